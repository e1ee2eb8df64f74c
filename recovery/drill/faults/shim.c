/* A library to be preloaded (LD_PRELOAD): a process's disk and clock go wrong on demand.
 *
 * The variable SB_SHIM names a folder; a file in it turns a fault on, removing the file turns it
 * off. It is read anew every 50 ms at most. Paths are absolute, without links in them.
 *
 *   fsync-fails       PATH                    syncing a file at or below PATH gives EIO
 *   disk-full         PATH                    writing, making and extending there gives ENOSPC
 *   read-only         PATH                    whatever would change something there gives EROFS
 *   clock-offset-ms   NUMBER                  is added to the wall clock
 *   hold-at           WHEN CALL NTH TEXT      waits there until this file is gone
 *   kill-at           WHEN CALL NTH TEXT      ends there by SIGKILL
 *
 * WHEN is "before" or "after" the call has had its effect, CALL is unlink, rename or link, and TEXT
 * is a part of the path. NTH counts each process's matching calls, from 1; every one from there on
 * counts. Who is held writes "PID CALL PATH" to the file "held"; whoever is refused makes "refused";
 * whoever is told a shifted time adds "PID NUMBER" to "shifted", once for each offset.
 *
 * Not seen: memory maps, io_uring, stdio's own writes, and calls that libc makes inside itself.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define LOOK_EVERY_NS 50000000LL
#define WALL_S 1000000000LL /* seconds: what is more is since 1970, what is less since the start */

struct point {
    int on, after;
    long nth;
    char call[16], text[PATH_MAX];
};

struct rules {
    char fsync_fails[PATH_MAX], disk_full[PATH_MAX], read_only[PATH_MAX];
    long long offset_ns;
    struct point hold, kill;
};

static struct rules ring[8]; /* a reader that sleeps through seven changes is not expected */
static _Atomic(struct rules *) current = &ring[0];
static atomic_llong looked_ns = -LOOK_EVERY_NS;
static atomic_flag looking = ATOMIC_FLAG_INIT;
static atomic_long holds, kills;
static atomic_llong shifted_ns; /* the offset that this process has told that it goes by */
static atomic_int shifted_pid;

/* --- the real ones ----------------------------------------------------------------------------- */

#define REAL(result, name, ...)                                                                    \
    static result (*real_)(__VA_ARGS__);                                                           \
    if (!real_) *(void **)&real_ = dlsym(RTLD_NEXT, #name)

static int real_clock(clockid_t clock, struct timespec *at)
{
    REAL(int, clock_gettime, clockid_t, struct timespec *);
    return real_ ? real_(clock, at) : (int)syscall(SYS_clock_gettime, clock, at);
}

/* --- what is told ------------------------------------------------------------------------------ */

static int control(const char *name, char *path)
{
    static char folder[PATH_MAX]; /* the environment may be changed while it is read */
    if (!folder[0]) {
        const char *given = getenv("SB_SHIM");
        if (!given || strlen(given) >= PATH_MAX) return 0;
        strcpy(folder, given);
    }
    int n = snprintf(path, PATH_MAX, "%s/%s", folder, name);
    return n > 0 && n < PATH_MAX;
}

static int told(const char *name, char *text)
{
    char path[PATH_MAX];
    text[0] = 0;
    if (!control(name, path)) return 0;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0) return 0;
    ssize_t n = syscall(SYS_read, fd, text, PATH_MAX - 1);
    syscall(SYS_close, fd);
    text[n < 0 ? 0 : n] = 0;
    text[strcspn(text, "\n")] = 0;
    return text[0] != 0;
}

static void told_point(const char *name, struct point *point)
{
    char text[PATH_MAX], when[8];
    memset(point, 0, sizeof *point);
    if (!told(name, text)) return;
    int from = 0;
    if (sscanf(text, "%7s %15s %ld %n", when, point->call, &point->nth, &from) < 3 || !from) return;
    strcpy(point->text, text + from);
    point->after = !strcmp(when, "after");
    point->on = 1;
}

static void look(void)
{
    static struct rules next; /* guarded by `looking` */
    static int at;
    char text[PATH_MAX];
    memset(&next, 0, sizeof next);
    told("fsync-fails", next.fsync_fails);
    told("disk-full", next.disk_full);
    told("read-only", next.read_only);
    if (told("clock-offset-ms", text)) next.offset_ns = atoll(text) * 1000000LL;
    told_point("hold-at", &next.hold);
    told_point("kill-at", &next.kill);
    struct rules *now = atomic_load(&current);
    if (!memcmp(now, &next, sizeof next)) return;
    if (memcmp(&now->hold, &next.hold, sizeof next.hold)) atomic_store(&holds, 0);
    if (memcmp(&now->kill, &next.kill, sizeof next.kill)) atomic_store(&kills, 0);
    if (now->offset_ns != next.offset_ns) atomic_store(&shifted_ns, 0);
    at = (at + 1) % (int)(sizeof ring / sizeof ring[0]);
    ring[at] = next;
    atomic_store(&current, &ring[at]);
}

static const struct rules *rules(void)
{
    struct timespec now;
    real_clock(CLOCK_MONOTONIC, &now);
    long long now_ns = now.tv_sec * 1000000000LL + now.tv_nsec;
    if (now_ns - atomic_load_explicit(&looked_ns, memory_order_relaxed) >= LOOK_EVERY_NS &&
        !atomic_flag_test_and_set(&looking)) {
        int before = errno;
        look();
        errno = before;
        atomic_store(&looked_ns, now_ns);
        atomic_flag_clear(&looking);
    }
    return atomic_load(&current);
}

/* --- paths ------------------------------------------------------------------------------------- */

static int of_fd(int fd, char *path)
{
    char link[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[n < 0 ? 0 : n] = 0;
    return n > 0;
}

static const char *whole(int folder, const char *name, char *path)
{
    if (name[0] == '/') return name;
    if (folder == AT_FDCWD) {
        if (syscall(SYS_getcwd, path, PATH_MAX) < 0) return name;
    } else if (!of_fd(folder, path)) {
        return name;
    }
    size_t n = strlen(path);
    snprintf(path + n, PATH_MAX - n, "/%s", name);
    return path;
}

static int below(const char *path, const char *top)
{
    size_t n = strlen(top);
    return n && !strncmp(path, top, n) && (path[n] == 0 || path[n] == '/');
}

static int exists(const char *path)
{
    return !syscall(SYS_faccessat, AT_FDCWD, path, F_OK);
}

static int refuse(int error)
{
    char file[PATH_MAX];
    if (control("refused", file))
        syscall(SYS_close, (int)syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT, 0644));
    return error;
}

/* Whether something may be changed at a path; 0, or the error number. `grows`: it needs room. */
static int refused(const char *path, int grows)
{
    const struct rules *r = rules();
    if (r->read_only[0] && below(path, r->read_only)) return refuse(EROFS);
    if (grows && r->disk_full[0] && below(path, r->disk_full)) return refuse(ENOSPC);
    return 0;
}

static int refused_at(int folder, const char *name, int grows)
{
    const struct rules *r = rules();
    if (!r->read_only[0] && !r->disk_full[0]) return 0;
    char path[PATH_MAX];
    return refused(whole(folder, name, path), grows);
}

static int refused_fd(int fd)
{
    const struct rules *r = rules();
    char path[PATH_MAX];
    if (!r->read_only[0] && !r->disk_full[0]) return 0;
    return of_fd(fd, path) ? refused(path, 1) : 0;
}

static int refused_sync(int fd)
{
    const struct rules *r = rules();
    char path[PATH_MAX];
    if (!r->fsync_fails[0] || !of_fd(fd, path) || !below(path, r->fsync_fails)) return 0;
    return refuse(EIO);
}

#define REFUSE(error)                                                                              \
    do {                                                                                           \
        int error_ = (error);                                                                      \
        if (error_) {                                                                              \
            errno = error_;                                                                        \
            return -1;                                                                             \
        }                                                                                          \
    } while (0)

/* --- points at which a process waits or dies --------------------------------------------------- */

static int matches(const struct point *point, const char *call, const char *path, int after)
{
    return point->on && point->after == after && !strcmp(point->call, call) &&
           strstr(path, point->text);
}

static void wait_held(const char *call, const char *path)
{
    char file[PATH_MAX], line[PATH_MAX + 64];
    if (!control("held", file)) return;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC,
                          0644);
    if (fd >= 0) {
        int n = snprintf(line, sizeof line, "%d %s %s\n", getpid(), call, path);
        syscall(SYS_write, fd, line, (size_t)n);
        syscall(SYS_close, fd);
    }
    control("hold-at", file);
    struct timespec nap = {0, 20000000};
    while (exists(file)) syscall(SYS_nanosleep, &nap, NULL);
}

static void pass(const char *call, int folder, const char *name, int after)
{
    const struct rules *r = rules();
    if (!r->hold.on && !r->kill.on) return;
    char space[PATH_MAX];
    const char *path = whole(folder, name, space);
    int before = errno;
    if (matches(&r->kill, call, path, after) && atomic_fetch_add(&kills, 1) + 1 >= r->kill.nth)
        syscall(SYS_kill, getpid(), SIGKILL);
    if (matches(&r->hold, call, path, after) && atomic_fetch_add(&holds, 1) + 1 >= r->hold.nth)
        wait_held(call, path);
    errno = before;
}

/* --- names ------------------------------------------------------------------------------------- */

#define UNNAMED(folder, name, done)                                                                \
    REFUSE(refused_at(folder, name, 0));                                                           \
    pass("unlink", folder, name, 0);                                                               \
    int result = done;                                                                             \
    if (!result) pass("unlink", folder, name, 1);                                                  \
    return result

EXPORT int unlink(const char *name)
{
    REAL(int, unlink, const char *);
    UNNAMED(AT_FDCWD, name, real_(name));
}

EXPORT int remove(const char *name)
{
    REAL(int, remove, const char *);
    UNNAMED(AT_FDCWD, name, real_(name));
}

EXPORT int unlinkat(int folder, const char *name, int flags)
{
    REAL(int, unlinkat, int, const char *, int);
    UNNAMED(folder, name, real_(folder, name, flags));
}

EXPORT int rmdir(const char *name)
{
    REAL(int, rmdir, const char *);
    REFUSE(refused_at(AT_FDCWD, name, 0));
    return real_(name);
}

#define NAMED(call, grows, from_folder, from, to_folder, to, done)                                 \
    REFUSE(refused_at(from_folder, from, 0));                                                      \
    REFUSE(refused_at(to_folder, to, grows));                                                      \
    pass(call, to_folder, to, 0);                                                                  \
    int result = done;                                                                             \
    if (!result) pass(call, to_folder, to, 1);                                                     \
    return result

EXPORT int rename(const char *from, const char *to)
{
    REAL(int, rename, const char *, const char *);
    NAMED("rename", 0, AT_FDCWD, from, AT_FDCWD, to, real_(from, to));
}

EXPORT int renameat(int ff, const char *from, int tf, const char *to)
{
    REAL(int, renameat, int, const char *, int, const char *);
    NAMED("rename", 0, ff, from, tf, to, real_(ff, from, tf, to));
}

EXPORT int renameat2(int ff, const char *from, int tf, const char *to, unsigned int flags)
{
    REAL(int, renameat2, int, const char *, int, const char *, unsigned int);
    NAMED("rename", 0, ff, from, tf, to, real_(ff, from, tf, to, flags));
}

EXPORT int link(const char *from, const char *to)
{
    REAL(int, link, const char *, const char *);
    NAMED("link", 1, AT_FDCWD, from, AT_FDCWD, to, real_(from, to));
}

EXPORT int linkat(int ff, const char *from, int tf, const char *to, int flags)
{
    REAL(int, linkat, int, const char *, int, const char *, int);
    NAMED("link", 1, ff, from, tf, to, real_(ff, from, tf, to, flags));
}

EXPORT int mkdir(const char *name, mode_t mode)
{
    REAL(int, mkdir, const char *, mode_t);
    if (!exists(name)) REFUSE(refused_at(AT_FDCWD, name, 1));
    return real_(name, mode);
}

EXPORT int mkdirat(int folder, const char *name, mode_t mode)
{
    REAL(int, mkdirat, int, const char *, mode_t);
    char path[PATH_MAX];
    if (!exists(whole(folder, name, path))) REFUSE(refused_at(folder, name, 1));
    return real_(folder, name, mode);
}

/* --- opening ----------------------------------------------------------------------------------- */

static int refused_open(int folder, const char *name, int flags)
{
    const struct rules *r = rules();
    if (!r->read_only[0] && !r->disk_full[0]) return 0;
    if (!(flags & (O_CREAT | O_TRUNC)) && (flags & O_ACCMODE) == O_RDONLY) return 0;
    char space[PATH_MAX];
    const char *path = whole(folder, name, space);
    return refused(path, (flags & O_CREAT) && !exists(path));
}

#define OPENED(folder, done)                                                                       \
    mode_t mode = 0;                                                                               \
    if (flags & (O_CREAT | __O_TMPFILE)) {                                                         \
        va_list more;                                                                              \
        va_start(more, flags);                                                                     \
        mode = va_arg(more, mode_t);                                                               \
        va_end(more);                                                                              \
    }                                                                                              \
    REFUSE(refused_open(folder, name, flags));                                                     \
    return done

EXPORT int open(const char *name, int flags, ...)
{
    REAL(int, open, const char *, int, ...);
    OPENED(AT_FDCWD, real_(name, flags, mode));
}

EXPORT int open64(const char *name, int flags, ...)
{
    REAL(int, open64, const char *, int, ...);
    OPENED(AT_FDCWD, real_(name, flags, mode));
}

EXPORT int openat(int folder, const char *name, int flags, ...)
{
    REAL(int, openat, int, const char *, int, ...);
    OPENED(folder, real_(folder, name, flags, mode));
}

EXPORT int openat64(int folder, const char *name, int flags, ...)
{
    REAL(int, openat64, int, const char *, int, ...);
    OPENED(folder, real_(folder, name, flags, mode));
}

EXPORT int creat(const char *name, mode_t mode)
{
    return open(name, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

EXPORT int creat64(const char *name, mode_t mode)
{
    return open64(name, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

static int flags_of(const char *how)
{
    if (how[0] == 'r') return strchr(how, '+') ? O_RDWR : O_RDONLY;
    return O_WRONLY | O_CREAT;
}

#define FOPENED(done)                                                                              \
    int error = refused_open(AT_FDCWD, name, flags_of(how));                                       \
    if (error) {                                                                                   \
        errno = error;                                                                             \
        return NULL;                                                                               \
    }                                                                                              \
    return done

EXPORT FILE *fopen(const char *name, const char *how)
{
    REAL(FILE *, fopen, const char *, const char *);
    FOPENED(real_(name, how));
}

EXPORT FILE *fopen64(const char *name, const char *how)
{
    REAL(FILE *, fopen64, const char *, const char *);
    FOPENED(real_(name, how));
}

/* --- writing ----------------------------------------------------------------------------------- */

#define WRITES(result, name, parameters, arguments, ...)                                           \
    EXPORT result name parameters                                                                  \
    {                                                                                              \
        REAL(result, name, __VA_ARGS__);                                                           \
        REFUSE(refused_fd(fd));                                                                    \
        return real_ arguments;                                                                    \
    }

WRITES(ssize_t, write, (int fd, const void *b, size_t n), (fd, b, n), int, const void *, size_t)
WRITES(ssize_t, writev, (int fd, const struct iovec *v, int n), (fd, v, n), int,
       const struct iovec *, int)
WRITES(ssize_t, pwrite, (int fd, const void *b, size_t n, off_t at), (fd, b, n, at), int,
       const void *, size_t, off_t)
WRITES(ssize_t, pwrite64, (int fd, const void *b, size_t n, off64_t at), (fd, b, n, at), int,
       const void *, size_t, off64_t)
WRITES(int, fallocate, (int fd, int mode, off_t at, off_t n), (fd, mode, at, n), int, int, off_t,
       off_t)
WRITES(int, fallocate64, (int fd, int mode, off64_t at, off64_t n), (fd, mode, at, n), int, int,
       off64_t, off64_t)

EXPORT int posix_fallocate(int fd, off_t at, off_t n)
{
    REAL(int, posix_fallocate, int, off_t, off_t);
    int error = refused_fd(fd);
    return error ? error : real_(fd, at, n);
}

EXPORT int posix_fallocate64(int fd, off64_t at, off64_t n)
{
    REAL(int, posix_fallocate64, int, off64_t, off64_t);
    int error = refused_fd(fd);
    return error ? error : real_(fd, at, n);
}

/* --- syncing ----------------------------------------------------------------------------------- */

#define SYNCS(name, parameters, arguments, ...)                                                    \
    EXPORT int name parameters                                                                     \
    {                                                                                              \
        REAL(int, name, __VA_ARGS__);                                                              \
        REFUSE(refused_sync(fd));                                                                  \
        return real_ arguments;                                                                    \
    }

SYNCS(fsync, (int fd), (fd), int)
SYNCS(fdatasync, (int fd), (fd), int)
SYNCS(syncfs, (int fd), (fd), int)
SYNCS(sync_file_range, (int fd, off64_t at, off64_t n, unsigned int flags), (fd, at, n, flags), int,
      off64_t, off64_t, unsigned int)

/* --- the wall clock ---------------------------------------------------------------------------- */

static void shift(struct timespec *at, long long by_ns)
{
    long long ns = at->tv_nsec + by_ns % 1000000000LL;
    at->tv_sec += by_ns / 1000000000LL + (ns < 0 ? -1 : ns >= 1000000000LL);
    at->tv_nsec = (ns + 1000000000LL) % 1000000000LL;
}

static void tell_shifted(long long by_ns)
{
    char file[PATH_MAX], line[64];
    int pid = getpid(); /* a fork has what its parent told */
    if (atomic_exchange(&shifted_ns, by_ns) == by_ns && atomic_load(&shifted_pid) == pid) return;
    atomic_store(&shifted_pid, pid);
    if (!control("shifted", file)) return;
    int before = errno;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC,
                          0644);
    if (fd >= 0) {
        int n = snprintf(line, sizeof line, "%d %lld\n", pid, by_ns / 1000000LL);
        syscall(SYS_write, fd, line, (size_t)n);
        syscall(SYS_close, fd);
    }
    errno = before;
}

EXPORT int clock_gettime(clockid_t clock, struct timespec *at)
{
    int result = real_clock(clock, at);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        long long by_ns = rules()->offset_ns;
        if (by_ns) {
            shift(at, by_ns);
            tell_shifted(by_ns);
        }
    }
    return result;
}

EXPORT int gettimeofday(struct timeval *at, void *zone)
{
    struct timespec now;
    (void)zone;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return result;
}

EXPORT time_t time(time_t *at)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

/* Who waits until a time of this clock must wait as long as was meant. */
static const struct timespec *unshifted(const struct timespec *until, struct timespec *space)
{
    long long offset_ns = rules()->offset_ns;
    if (!offset_ns || !until || until->tv_sec < WALL_S) return until;
    *space = *until;
    shift(space, -offset_ns);
    return space;
}

EXPORT int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex,
                                  const struct timespec *until)
{
    static int (*real_)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec space;
    /* Its oldest version is another function; which one is the default differs by machine. */
    if (!real_) *(void **)&real_ = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real_) *(void **)&real_ = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    return real_(cond, mutex, unshifted(until, &space));
}

EXPORT int sem_timedwait(sem_t *sem, const struct timespec *until)
{
    struct timespec space;
    REAL(int, sem_timedwait, sem_t *, const struct timespec *);
    return real_(sem, unshifted(until, &space));
}

EXPORT int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *until)
{
    struct timespec space;
    REAL(int, pthread_mutex_timedlock, pthread_mutex_t *, const struct timespec *);
    return real_(mutex, unshifted(until, &space));
}
