import java.nio.charset.StandardCharsets;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.serialization.AbstractDeserializationSchema;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.functions.KeySelector;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.base.DeliveryGuarantee;
import org.apache.flink.connector.kafka.sink.KafkaRecordSerializationSchema;
import org.apache.flink.connector.kafka.sink.KafkaSink;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.connector.kafka.source.enumerator.initializer.OffsetsInitializer;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.util.Collector;
import org.apache.kafka.clients.producer.ProducerRecord;

/**
 * A count by key in Flink from a topic of Kafka to a topic of Kafka, until it is ended.
 *
 * <p>FlinkKafka SERVERS SOURCE TARGET PARALLELISM CHECKPOINT_MS GUARANTEE BUFFERS FOLDER
 *
 * <p>Values are {"k": 123}; each row gives {"k":123,"n":4} with the key 123. GUARANTEE is
 * AT_LEAST_ONCE or EXACTLY_ONCE, of the sink. BUFFERS is execution.buffer-timeout.interval. FOLDER
 * is for state and checkpoints.
 */
public final class FlinkKafka {
  private static final String TRANSACTION_MS = "600000";

  private static final class Key extends AbstractDeserializationSchema<Long> {
    private transient ObjectMapper mapper;

    @Override
    public void open(InitializationContext context) {
      mapper = new ObjectMapper();
    }

    @Override
    public Long deserialize(byte[] value) throws java.io.IOException {
      return mapper.readTree(value).get("k").asLong();
    }
  }

  private static final class Itself implements KeySelector<Long, Long> {
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

  private static final class Records implements KafkaRecordSerializationSchema<Tuple2<Long, Long>> {
    private final String topic;

    Records(String topic) {
      this.topic = topic;
    }

    @Override
    public ProducerRecord<byte[], byte[]> serialize(
        Tuple2<Long, Long> row, KafkaSinkContext context, Long timestamp) {
      byte[] key = Long.toString(row.f0).getBytes(StandardCharsets.US_ASCII);
      String value = "{\"k\":" + row.f0 + ",\"n\":" + row.f1 + "}";
      return new ProducerRecord<>(topic, key, value.getBytes(StandardCharsets.US_ASCII));
    }
  }

  public static void main(String[] given) throws Exception {
    int parallelism = Integer.parseInt(given[3]);
    Configuration settings = new Configuration();
    settings.setString("state.backend.type", "rocksdb");
    settings.setString("state.backend.rocksdb.localdir", given[7] + "/rocksdb");
    settings.setString("execution.checkpointing.incremental", "true");
    settings.setString("execution.checkpointing.interval", given[4] + " ms");
    settings.setString("execution.checkpointing.dir", "file://" + given[7] + "/checkpoints");
    settings.setString("execution.buffer-timeout.interval", given[6]);
    settings.setString("restart-strategy.type", "none");
    settings.setString("taskmanager.memory.managed.size", "1g");
    settings.setString("pipeline.object-reuse", "true");
    StreamExecutionEnvironment env =
        StreamExecutionEnvironment.createLocalEnvironment(parallelism, settings);
    KafkaSource<Long> source =
        KafkaSource.<Long>builder()
            .setBootstrapServers(given[0])
            .setTopics(given[1])
            .setGroupId("flink-" + given[2])
            .setStartingOffsets(OffsetsInitializer.earliest())
            .setValueOnlyDeserializer(new Key())
            .build();
    KafkaSink<Tuple2<Long, Long>> sink =
        KafkaSink.<Tuple2<Long, Long>>builder()
            .setBootstrapServers(given[0])
            .setRecordSerializer(new Records(given[2]))
            .setDeliveryGuarantee(DeliveryGuarantee.valueOf(given[5]))
            .setTransactionalIdPrefix("flink-" + given[2])
            .setProperty("transaction.timeout.ms", TRANSACTION_MS)
            .build();
    env.fromSource(source, WatermarkStrategy.noWatermarks(), "rows")
        .keyBy(new Itself(), Types.LONG)
        .process(new Count())
        .returns(Types.TUPLE(Types.LONG, Types.LONG))
        .sinkTo(sink);
    env.execute("count");
  }
}
