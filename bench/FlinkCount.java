import java.io.RandomAccessFile;
import java.nio.ByteOrder;
import java.nio.LongBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.concurrent.atomic.AtomicLongArray;
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
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.datagen.source.DataGeneratorSource;
import org.apache.flink.connector.datagen.source.GeneratorFunction;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.util.Collector;

/**
 * A count by key in Flink: FlinkCount KEYS ROWS WARM PARALLELISM STATE RESULT.
 *
 * <p>KEYS is a file of ROWS keys (little-endian 64-bit). The source maps it into memory: the same
 * keys in the same order as the other sides read from parquet, and cheaper. Each row gives (key,
 * count so far). The time is taken by the sink, from the moment WARM rows were out to the last row:
 * the checkpoint after it is not waited for. RESULT gets one line of JSON.
 */
public final class FlinkCount {
  private static final int WRITERS = 64;
  private static final int PUBLISH_EVERY = 1000;
  private static final AtomicLongArray ROWS = new AtomicLongArray(WRITERS);
  private static final AtomicLongArray TOTALS = new AtomicLongArray(WRITERS);
  private static final AtomicLongArray WEIGHTED = new AtomicLongArray(WRITERS);
  private static final AtomicLongArray ENDED_NS = new AtomicLongArray(WRITERS);
  private static volatile long warmNs;

  /** Row number to key. */
  private static final class Keys implements GeneratorFunction<Long, Long> {
    private final String path;
    private transient LongBuffer keys;

    Keys(String path) {
      this.path = path;
    }

    @Override
    public void open(SourceReaderContext context) throws Exception {
      try (RandomAccessFile file = new RandomAccessFile(path, "r")) {
        keys =
            file.getChannel()
                .map(FileChannel.MapMode.READ_ONLY, 0, file.length())
                .order(ByteOrder.LITTLE_ENDIAN)
                .asLongBuffer();
      }
    }

    @Override
    public Long map(Long row) {
      return keys.get(row.intValue());
    }
  }

  private static final class Same implements KeySelector<Long, Long> {
    @Override
    public Long getKey(Long key) {
      return key;
    }
  }

  private static final class Count extends KeyedProcessFunction<Long, Long, Tuple2<Long, Long>> {
    private transient ValueState<Long> count;
    private transient Tuple2<Long, Long> out;

    @Override
    public void open(OpenContext context) {
      count = getRuntimeContext().getState(new ValueStateDescriptor<>("count", Types.LONG));
      out = new Tuple2<>();
    }

    @Override
    public void processElement(Long key, Context context, Collector<Tuple2<Long, Long>> collector)
        throws Exception {
      Long old = count.value();
      long now = old == null ? 1L : old + 1L;
      count.update(now);
      out.f0 = key;
      out.f1 = now;
      collector.collect(out);
    }
  }

  /** Counts and adds up what comes out. */
  private static final class Checked implements Sink<Tuple2<Long, Long>> {
    @Override
    public SinkWriter<Tuple2<Long, Long>> createWriter(WriterInitContext context) {
      int index = context.getTaskInfo().getIndexOfThisSubtask();
      return new SinkWriter<>() {
        private long rows;
        private long total;
        private long weighted;

        @Override
        public void write(Tuple2<Long, Long> row, Context ignored) {
          total += row.f1;
          weighted += row.f0 * row.f1;
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

  public static void main(String[] given) throws Exception {
    long rows = Long.parseLong(given[1]);
    long warm = Long.parseLong(given[2]);
    int parallelism = Integer.parseInt(given[3]);
    Configuration settings = new Configuration();
    settings.setString("state.backend.type", "rocksdb");
    settings.setString("state.backend.rocksdb.localdir", given[4] + "/rocksdb");
    settings.setString("execution.checkpointing.incremental", "true");
    settings.setString("execution.checkpointing.interval", "2 s");
    settings.setString("execution.checkpointing.dir", "file://" + given[4] + "/checkpoints");
    settings.setString("taskmanager.memory.managed.size", "1g");
    settings.setString("pipeline.object-reuse", "true");
    StreamExecutionEnvironment env =
        StreamExecutionEnvironment.createLocalEnvironment(parallelism, settings);
    DataGeneratorSource<Long> source =
        new DataGeneratorSource<>(new Keys(given[0]), rows, Types.LONG);
    env.fromSource(source, WatermarkStrategy.noWatermarks(), "keys")
        .keyBy(new Same(), Types.LONG)
        .process(new Count())
        .returns(Types.TUPLE(Types.LONG, Types.LONG))
        .sinkTo(new Checked());
    Thread watcher = new Thread(() -> watch(warm), "watcher");
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
            "{\"rows\": %d, \"total\": %d, \"weighted\": %d, \"counted_s\": %.4f}%n",
            sum(ROWS), sum(TOTALS), sum(WEIGHTED), (ended - warmNs) / 1e9);
    Files.writeString(Path.of(given[5]), found);
  }
}
