import java.io.Serializable;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.concurrent.atomic.AtomicLongArray;
import java.util.concurrent.locks.LockSupport;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.connector.sink2.Sink;
import org.apache.flink.api.connector.sink2.SinkWriter;
import org.apache.flink.api.connector.sink2.WriterInitContext;
import org.apache.flink.api.connector.source.SourceReaderContext;
import org.apache.flink.api.java.functions.KeySelector;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.datagen.source.DataGeneratorSource;
import org.apache.flink.connector.datagen.source.GeneratorFunction;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.util.Collector;

/**
 * A count by key in Flink, whose rows are due one after the other.
 *
 * <p>FlinkContinuous ROWS KEYS RATE WARM PARALLELISM BUFFERS STATE RESULT
 *
 * <p>Row i has a key made of i alone (as in continuousjob.py). RATE is rows per second, 0 for as
 * fast as they are taken. With a rate a row has the time when it is due; WARM is in milliseconds
 * then, else in rows: the latencies, and the time, of what comes before do not count. Each row gives
 * (key, count so far, when it was due). BUFFERS is Flink's execution.buffer-timeout.interval.
 * RESULT gets one line of JSON.
 */
public final class FlinkContinuous {
  private static final int WRITERS = 64;
  private static final int PUBLISH_EVERY = 1000;
  private static final int BIN_US = 50;
  private static final int BINS = 400_000;
  private static final long AHEAD_MS = 5_000;
  private static final long NAP_NS = 1_000_000;
  private static final long START_NS = System.nanoTime();
  private static final long START_US = System.currentTimeMillis() * 1000;
  private static final AtomicLongArray ROWS = new AtomicLongArray(WRITERS);
  private static final AtomicLongArray TOTALS = new AtomicLongArray(WRITERS);
  private static final AtomicLongArray WEIGHTED = new AtomicLongArray(WRITERS);
  private static final AtomicLongArray ENDED_NS = new AtomicLongArray(WRITERS);
  private static final int[][] TOOK = new int[WRITERS][];
  private static volatile long warmNs;

  private static long nowUs() {
    return START_US + (System.nanoTime() - START_NS) / 1000;
  }

  /** Row number to (key, when due). The rows of a reader are due by how many it has made. */
  private static final class Rows implements GeneratorFunction<Long, Tuple2<Long, Long>> {
    private final long keys;
    private final double eachUs;
    private final long startUs;
    private transient Tuple2<Long, Long> out;
    private transient long made;

    Rows(long keys, double eachUs, long startUs) {
      this.keys = keys;
      this.eachUs = eachUs;
      this.startUs = startUs;
    }

    @Override
    public void open(SourceReaderContext context) {
      out = new Tuple2<>();
    }

    @Override
    public Tuple2<Long, Long> map(Long row) {
      long mixed = row * 0x9E3779B97F4A7C15L;
      mixed ^= mixed >>> 32;
      mixed *= 0xD1B54A32D192ED03L;
      out.f0 = (mixed >>> 33) % keys;
      long dueUs = startUs + (long) (made++ * eachUs);
      if (eachUs > 0) {
        while (nowUs() < dueUs) {
          LockSupport.parkNanos(NAP_NS);
        }
      }
      out.f1 = dueUs;
      return out;
    }
  }

  private static final class Key implements KeySelector<Tuple2<Long, Long>, Long> {
    @Override
    public Long getKey(Tuple2<Long, Long> row) {
      return row.f0;
    }
  }

  private static final class Count
      extends KeyedProcessFunction<Long, Tuple2<Long, Long>, Tuple3<Long, Long, Long>> {
    private transient ValueState<Long> count;
    private transient Tuple3<Long, Long, Long> out;

    @Override
    public void open(OpenContext context) {
      count = getRuntimeContext().getState(new ValueStateDescriptor<>("count", Types.LONG));
      out = new Tuple3<>();
    }

    @Override
    public void processElement(
        Tuple2<Long, Long> row, Context context, Collector<Tuple3<Long, Long, Long>> collector)
        throws Exception {
      Long old = count.value();
      long now = old == null ? 1L : old + 1L;
      count.update(now);
      out.f0 = row.f0;
      out.f1 = now;
      out.f2 = row.f1;
      collector.collect(out);
    }
  }

  /** Counts and adds up what comes out, and how long it took. */
  private static final class Measuring implements Sink<Tuple3<Long, Long, Long>>, Serializable {
    private final long fromUs;

    Measuring(long fromUs) {
      this.fromUs = fromUs;
    }

    @Override
    public SinkWriter<Tuple3<Long, Long, Long>> createWriter(WriterInitContext context) {
      int index = context.getTaskInfo().getIndexOfThisSubtask();
      int[] took = TOOK[index] = new int[BINS];
      return new SinkWriter<>() {
        private long rows;
        private long total;
        private long weighted;

        @Override
        public void write(Tuple3<Long, Long, Long> row, Context ignored) {
          total += row.f1;
          weighted += row.f0 * row.f1;
          if (fromUs > 0 && row.f2 >= fromUs) {
            long us = Math.max(0, nowUs() - row.f2);
            took[(int) Math.min(BINS - 1, us / BIN_US)]++;
          }
          if (++rows % PUBLISH_EVERY == 0) {
            ROWS.lazySet(index, rows);
          }
        }

        @Override
        public void flush(boolean endOfInput) {
          if (endOfInput) {
            ROWS.set(index, rows);
            TOTALS.set(index, total);
            WEIGHTED.set(index, weighted);
            ENDED_NS.compareAndSet(index, 0, System.nanoTime());
          }
        }

        @Override
        public void close() {}
      };
    }
  }

  private static long sum(AtomicLongArray of) {
    long sum = 0;
    for (int i = 0; i < WRITERS; i++) {
      sum += of.get(i);
    }
    return sum;
  }

  /** Notes when enough rows were out. */
  private static void watch(long warm) {
    while (sum(ROWS) < warm) {
      try {
        Thread.sleep(2);
      } catch (InterruptedException stopped) {
        return;
      }
    }
    warmNs = System.nanoTime();
  }

  private static String latencies() {
    long[] all = new long[BINS];
    long rows = 0;
    int last = 0;
    for (int[] took : TOOK) {
      for (int i = 0; took != null && i < BINS; i++) {
        all[i] += took[i];
        rows += took[i];
        last = took[i] > 0 ? Math.max(last, i) : last;
      }
    }
    StringBuilder said = new StringBuilder();
    for (String of : new String[] {"50", "90", "99", "99.9"}) {
      long wanted = (long) Math.ceil(rows * Double.parseDouble(of) / 100);
      long seen = 0;
      int bin = 0;
      while (bin < BINS - 1 && (seen += all[bin]) < wanted) {
        bin++;
      }
      said.append(String.format("\"p%s_ms\": %.2f, ", of, (bin + 0.5) * BIN_US / 1000));
    }
    return said + String.format("\"max_ms\": %.2f, ", (last + 1.0) * BIN_US / 1000);
  }

  public static void main(String[] given) throws Exception {
    long rows = Long.parseLong(given[0]);
    double rate = Double.parseDouble(given[2]);
    long warm = Long.parseLong(given[3]);
    int parallelism = Integer.parseInt(given[4]);
    Configuration settings = new Configuration();
    settings.setString("state.backend.type", "rocksdb");
    settings.setString("state.backend.rocksdb.localdir", given[6] + "/rocksdb");
    settings.setString("execution.checkpointing.incremental", "true");
    settings.setString("execution.checkpointing.interval", "2 s");
    settings.setString("execution.checkpointing.dir", "file://" + given[6] + "/checkpoints");
    settings.setString("execution.buffer-timeout.interval", given[5]);
    settings.setString("taskmanager.memory.managed.size", "1g");
    settings.setString("pipeline.object-reuse", "true");
    StreamExecutionEnvironment env =
        StreamExecutionEnvironment.createLocalEnvironment(parallelism, settings);
    double eachUs = rate > 0 ? 1e6 * parallelism / rate : 0;
    long startUs = nowUs() + AHEAD_MS * 1000;
    DataGeneratorSource<Tuple2<Long, Long>> source =
        new DataGeneratorSource<>(
            new Rows(Long.parseLong(given[1]), eachUs, startUs),
            rows,
            Types.TUPLE(Types.LONG, Types.LONG));
    env.fromSource(source, WatermarkStrategy.noWatermarks(), "rows")
        .keyBy(new Key(), Types.LONG)
        .process(new Count())
        .returns(Types.TUPLE(Types.LONG, Types.LONG, Types.LONG))
        .sinkTo(new Measuring(rate > 0 ? startUs + warm * 1000 : 0));
    long warmRows = rate > 0 ? (long) (rate * warm / 1000) : warm;
    Thread watcher = new Thread(() -> watch(warmRows), "watcher");
    watcher.setDaemon(true);
    watcher.start();
    env.execute("count");
    watcher.join(10_000);
    long ended = 0;
    for (int i = 0; i < WRITERS; i++) {
      ended = Math.max(ended, ENDED_NS.get(i));
    }
    String found =
        String.format(
            "{%s\"rows\": %d, \"total\": %d, \"weighted\": %d, \"counted_s\": %.4f}%n",
            rate > 0 ? latencies() : "",
            sum(ROWS),
            sum(TOTALS),
            sum(WEIGHTED),
            (ended - warmNs) / 1e9);
    Files.writeString(Path.of(given[7]), found);
  }
}
