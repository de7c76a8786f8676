import io.grpc.Status;
import io.grpc.stub.StreamObserver;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.List;
import java.util.UUID;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.TimeUnit;
import perseus.v1.AgentServiceGrpc;
import perseus.v1.ConnectRequest;
import perseus.v1.ConnectResponse;
import perseus.v1.Goodbye;
import perseus.v1.Heartbeat;
import perseus.v1.Hello;
import perseus.v1.MessageRefused;
import perseus.v1.PlanOffer;
import perseus.v1.RankCoordinates;
import perseus.v1.RankLeft;
import perseus.v1.RankLeftReason;
import perseus.v1.RankRefused;
import perseus.v1.TelemetryBatch;
import perseus.v1.Welcome;

/** One stream to the coordinator, opened again whenever it ends. Every method may be called from any thread. */
final class Agent implements StreamObserver<ConnectResponse> {
    private static final int PROTOCOL_VERSION = 1;

    private final String instanceId = UUID.randomUUID().toString();
    private final Coordinator coordinator;
    private final AgentServiceGrpc.AgentServiceStub stub;
    private final List<ServedRank> ranks;
    private final ScheduledExecutorService timer = Executors.newSingleThreadScheduledExecutor();
    private final Deque<TelemetryBatch> unacknowledged = new ArrayDeque<>();
    private StreamObserver<ConnectRequest> requests;
    private ScheduledFuture<?> heart;
    private boolean isWelcome;
    private boolean isClosing;
    private long sequence;
    // The very first offer is deliberately answered too late.
    private PlanOffer late;
    private boolean wasLate;
    // The refusal of a rank whose job is served elsewhere: the stream ends, and follows it.
    private RankRefused elsewhere;

    Agent(Coordinator coordinator, List<ServedRank> ranks) {
        this.coordinator = coordinator;
        this.stub = AgentServiceGrpc.newStub(coordinator);
        this.ranks = ranks;
    }

    synchronized void connect() {
        requests = stub.connect(this);
        requests.onNext(ConnectRequest.newBuilder()
                .setHello(Hello.newBuilder()
                        .setInstanceId(instanceId)
                        .setAgentVersion("java")
                        .setHostname("localhost")
                        .setProtocolVersion(PROTOCOL_VERSION))
                .build());
    }

    synchronized boolean areAllAccepted() {
        return ranks.stream().allMatch(rank -> rank.isAccepted);
    }

    synchronized void begin(long iteration) {
        for (ServedRank rank : ranks) {
            var inForce = rank.begin(iteration);
            if (inForce != null) {
                send(ConnectRequest.newBuilder().setPlanInForce(inForce));
            }
        }
        if (late != null && iteration >= late.getStartIteration()) {
            PlanOffer offer = late;
            late = null;
            answer(offer);
        }
    }

    synchronized void end(ServedRank rank, Training.StageIteration measured) {
        sequence += 1;
        TelemetryBatch batch = rank.end(measured).setSequence(sequence).build();
        unacknowledged.add(batch);
        send(ConnectRequest.newBuilder().setTelemetry(batch));
    }

    synchronized boolean isAllAcknowledged() {
        return unacknowledged.isEmpty();
    }

    synchronized void close() {
        isClosing = true;
        for (ServedRank rank : ranks) {
            send(ConnectRequest.newBuilder()
                    .setRankLeft(RankLeft.newBuilder()
                            .setJobId(rank.jobId)
                            .setRank(rank.place)
                            .setReason(RankLeftReason.RANK_LEFT_REASON_FINISHED)));
        }
        send(ConnectRequest.newBuilder().setGoodbye(Goodbye.newBuilder().setReason("training is done")));
        requests.onCompleted();
        timer.shutdownNow();
    }

    @Override
    public synchronized void onNext(ConnectResponse response) {
        switch (response.getMessageCase()) {
            case WELCOME -> welcome(response.getWelcome());
            case RANK_ACCEPTED -> {
                var accepted = response.getRankAccepted();
                rank(accepted.getRank()).accept(accepted.getOrder().getComputationsList());
            }
            case RANK_REFUSED -> {
                RankRefused refused = response.getRankRefused();
                Client.say("rank refused: " + refused.getReason());
                if (!refused.getReason().equals("SERVED_ELSEWHERE")) {
                    timer.schedule(() -> join(rank(refused.getRank())), 1, TimeUnit.SECONDS);
                } else if (elsewhere == null) {
                    elsewhere = refused;
                    isWelcome = false;
                    requests.onError(Status.CANCELLED.asException());
                }
            }
            case PLAN_OFFER -> {
                if (wasLate) {
                    answer(response.getPlanOffer());
                } else {
                    late = response.getPlanOffer();
                    wasLate = true;
                }
            }
            case TELEMETRY_ACK -> acknowledge(response.getTelemetryAck().getSequence());
            case TELEMETRY_REFUSED -> {
                var refused = response.getTelemetryRefused();
                Client.say("batch refused: " + refused.getReason() + " " + refused.getField());
            }
            case MESSAGE_REFUSED -> Client.say("message refused: " + response.getMessageRefused().getReason());
            case HEARTBEAT, DRAIN -> {}
            default -> {
                Client.say("refused an unknown message");
                send(ConnectRequest.newBuilder()
                        .setMessageRefused(MessageRefused.newBuilder().setReason("UNKNOWN_MESSAGE")));
            }
        }
    }

    @Override
    public void onError(Throwable error) {
        ended(Status.fromThrowable(error).toString(), error);
    }

    @Override
    public void onCompleted() {
        ended("OK", null);
    }

    private synchronized void ended(String how, Throwable error) {
        isWelcome = false;
        ranks.forEach(rank -> rank.isAccepted = false);
        if (!isClosing) {
            Client.say("stream ended: " + how);
            boolean isFollowed = elsewhere != null
                    ? coordinator.follow(elsewhere.getReason(), elsewhere.getMetadataMap())
                    : coordinator.follow(error);
            elsewhere = null;
            timer.schedule(this::connect, isFollowed ? 0 : (long) (500 * Math.random()), TimeUnit.MILLISECONDS);
        }
    }

    private void welcome(Welcome welcome) {
        isWelcome = true;
        if (heart == null) {
            long thirdMs = (long) (1000 * welcome.getLeaseS() / 3);
            heart = timer.scheduleAtFixedRate(this::beat, thirdMs, thirdMs, TimeUnit.MILLISECONDS);
        }
        ranks.forEach(this::join);
        acknowledge(welcome.getAcknowledgedSequence());
        unacknowledged.forEach(batch -> send(ConnectRequest.newBuilder().setTelemetry(batch)));
    }

    private synchronized void join(ServedRank rank) {
        send(ConnectRequest.newBuilder().setRankJoined(rank.joined()));
    }

    private synchronized void beat() {
        send(ConnectRequest.newBuilder().setHeartbeat(Heartbeat.getDefaultInstance()));
    }

    private void answer(PlanOffer offer) {
        send(ConnectRequest.newBuilder().setPlanAnswer(rank(offer.getRank()).consider(offer)));
    }

    private void acknowledge(long upTo) {
        unacknowledged.removeIf(batch -> batch.getSequence() <= upTo);
    }

    private void send(ConnectRequest.Builder request) {
        if (isWelcome) {
            requests.onNext(request.build());
        }
    }

    /** Compare by numbers: a newer coordinator's message may have more fields, and then equals none of ours. */
    private ServedRank rank(RankCoordinates place) {
        return ranks.stream()
                .filter(rank -> rank.place.getPipeline() == place.getPipeline())
                .filter(rank -> rank.place.getStage() == place.getStage())
                .findFirst()
                .orElseThrow();
    }
}
