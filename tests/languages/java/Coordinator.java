import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.ErrorInfo;
import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.ProtoUtils;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;

/** The channel to a coordinator, or to another one of its fleet that serves the job: new calls go there. */
final class Coordinator extends Channel {
    private static final Metadata.Key<com.google.rpc.Status> DETAILS = Metadata.Key.of(
            "grpc-status-details-bin", ProtoUtils.metadataMarshaller(com.google.rpc.Status.getDefaultInstance()));
    private static final int MAX_HOPS = 2;
    private static final int ATTEMPTS = 20;
    private static final long RETRY_MS = 500;

    private final String target;
    private final Map<String, ManagedChannel> channels = new HashMap<>();
    private String address;
    private int hopCount;

    Coordinator(String target) {
        this.target = target;
        address = target;
    }

    @Override
    public <A, B> ClientCall<A, B> newCall(MethodDescriptor<A, B> method, CallOptions options) {
        return channel().newCall(method, options);
    }

    @Override
    public String authority() {
        return channel().authority();
    }

    private synchronized ManagedChannel channel() {
        return channels.computeIfAbsent(
                address, to -> ManagedChannelBuilder.forTarget(to).usePlaintext().build());
    }

    /** Go where an error says that the job is served, at most twice in a row; otherwise back to the target. */
    boolean follow(Throwable error) {
        Metadata trailers = Status.trailersFromThrowable(error);
        var status = trailers == null ? null : trailers.get(DETAILS);
        for (Any detail : status == null ? List.<Any>of() : status.getDetailsList()) {
            if (detail.is(ErrorInfo.class)) {
                try {
                    ErrorInfo info = detail.unpack(ErrorInfo.class);
                    return follow(info.getReason(), info.getMetadataMap());
                } catch (InvalidProtocolBufferException unreadable) {
                    throw new IllegalStateException(unreadable);
                }
            }
        }
        return follow("", Map.of());
    }

    /** The same for a refusal's reason and metadata. */
    synchronized boolean follow(String reason, Map<String, String> metadata) {
        String served = reason.equals("SERVED_ELSEWHERE") ? metadata.getOrDefault("address", "") : "";
        boolean isFollowed = !served.isEmpty() && !served.equals(address) && hopCount < MAX_HOPS;
        hopCount = isFollowed ? hopCount + 1 : 0;
        address = isFollowed ? served : target;
        return isFollowed;
    }

    /** Make a call that may be repeated; follow it, and repeat it while the coordinator is away. */
    <T> T call(Supplier<T> call) throws InterruptedException {
        for (int attempt = 1; ; attempt++) {
            try {
                return call.get();
            } catch (StatusRuntimeException error) {
                if (!follow(error)) {
                    var code = error.getStatus().getCode();
                    boolean isAway = code == Status.Code.UNAVAILABLE || code == Status.Code.DEADLINE_EXCEEDED;
                    if (!isAway || attempt == ATTEMPTS) {
                        throw error;
                    }
                    Thread.sleep(RETRY_MS);
                }
            }
        }
    }

    void close() throws InterruptedException {
        for (ManagedChannel channel : channels.values()) {
            channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
        }
    }
}
