import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import perseus.v1.Computation;
import perseus.v1.ComputationColumns;
import perseus.v1.ComputationKind;
import perseus.v1.EnergyEstimate;
import perseus.v1.EnergySample;
import perseus.v1.Gpu;
import perseus.v1.IterationColumns;
import perseus.v1.PlanAnswer;
import perseus.v1.PlanInForce;
import perseus.v1.PlanOffer;
import perseus.v1.PlanRefusalReason;
import perseus.v1.PlannedComputation;
import perseus.v1.RankCoordinates;
import perseus.v1.RankJoined;
import perseus.v1.StockClocks;
import perseus.v1.TelemetryBatch;

/** One rank in its agent: clocks in force, pending offer, measurements. */
final class ServedRank {
    private static final PlanOffer NO_PLAN =
            PlanOffer.newBuilder().setStock(StockClocks.getDefaultInstance()).build();

    final String jobId;
    final RankCoordinates place;
    boolean isAccepted;
    long iteration = -1;

    private final Gpu gpu;
    private List<Computation> order = List.of();
    private PlanOffer inForce = NO_PLAN;
    private PlanOffer pending;
    private int iterationCount;
    private final Map<Key, double[]> sums = new LinkedHashMap<>();

    private record Key(ComputationKind kind, int chunk, int clockMhz) {}

    ServedRank(String jobId, RankCoordinates place, Gpu gpu) {
        this.jobId = jobId;
        this.place = place;
        this.gpu = gpu;
    }

    RankJoined joined() {
        return RankJoined.newBuilder()
                .setJobId(jobId)
                .setRank(place)
                .setGpu(gpu)
                .setIteration(iteration)
                .setInForceEpoch(inForce.getEpoch())
                .setInForceVersion(inForce.getVersion())
                .build();
    }

    void accept(List<Computation> order) {
        this.order = order;
        isAccepted = true;
    }

    List<Computation> order() {
        return order;
    }

    /** The clock of each computation, MHz; 0 for stock. */
    List<Integer> clocksMhz() {
        return clocksOf(inForce);
    }

    PlanAnswer consider(PlanOffer offer) {
        PlanRefusalReason refusal = refusal(offer);
        boolean isAccepted = refusal == PlanRefusalReason.PLAN_REFUSAL_REASON_UNSPECIFIED;
        if (isAccepted) {
            pending = isSame(offer, inForce) ? null : offer;
        }
        return PlanAnswer.newBuilder()
                .setJobId(jobId)
                .setRank(place)
                .setEpoch(offer.getEpoch())
                .setVersion(offer.getVersion())
                .setAccepted(isAccepted)
                .setRefusalReason(refusal)
                .setIteration(iteration)
                .build();
    }

    private PlanRefusalReason refusal(PlanOffer offer) {
        if (!isAccepted) {
            return PlanRefusalReason.PLAN_REFUSAL_REASON_UNKNOWN_RANK;
        }
        if (!clocksOf(offer).stream()
                .allMatch(mhz -> mhz == 0 || gpu.getSupportedClocksMhzList().contains(mhz))) {
            return PlanRefusalReason.PLAN_REFUSAL_REASON_CLOCK_NOT_SUPPORTED;
        }
        if (offer.getStartIteration() <= iteration && !isSame(offer, inForce)) {
            return PlanRefusalReason.PLAN_REFUSAL_REASON_PAST_START;
        }
        return PlanRefusalReason.PLAN_REFUSAL_REASON_UNSPECIFIED;
    }

    /** Begin an iteration; return the message to send if it brings a plan into force, otherwise null. */
    PlanInForce begin(long number) {
        iteration = number;
        if (pending == null || number < pending.getStartIteration()) {
            return null;
        }
        inForce = pending;
        pending = null;
        iterationCount = 0;
        sums.clear();
        return PlanInForce.newBuilder()
                .setJobId(jobId)
                .setRank(place)
                .setEpoch(inForce.getEpoch())
                .setVersion(inForce.getVersion())
                .setIteration(number)
                .build();
    }

    /** End an iteration; return its telemetry. */
    TelemetryBatch.Builder end(Training.StageIteration measured) {
        List<Integer> clocksMhz = clocksMhz();
        iterationCount += 1;
        var computations = ComputationColumns.newBuilder();
        for (int i = 0; i < order.size(); i++) {
            Computation computation = order.get(i);
            Training.Run run = measured.runs().get(i);
            computations
                    .addIteration(iteration)
                    .addKind(computation.getKind())
                    .addMicrobatch(computation.getMicrobatch())
                    .addChunk(computation.getChunk())
                    .addBeginS(run.beginS())
                    .addDurationS(run.durationS())
                    .addClockMhz(clocksMhz.get(i));
            var key = new Key(computation.getKind(), computation.getChunk(), clocksMhz.get(i));
            double[] sum = sums.computeIfAbsent(key, unused -> new double[3]);
            sum[0] += 1;
            sum[1] += run.durationS();
            sum[2] += run.energyJ();
        }
        return TelemetryBatch.newBuilder()
                .setJobId(jobId)
                .setRank(place)
                .setIterations(IterationColumns.newBuilder()
                        .addIteration(iteration)
                        .addPlanVersion(inForce.getVersion())
                        .addDurationS(measured.durationS())
                        .addEnergyJ(measured.energyJ())
                        .addIsRegular(true)
                        .addClockEventReasons(0))
                .setComputations(computations)
                .setEnergy(estimate(measured.blockingPowerW()));
    }

    private EnergyEstimate estimate(double blockingPowerW) {
        var estimate = EnergyEstimate.newBuilder()
                .setPlanVersion(inForce.getVersion())
                .setIterationCount(iterationCount)
                .setBlockingPowerW(blockingPowerW);
        sums.forEach((key, sum) -> estimate.addSamples(EnergySample.newBuilder()
                .setKind(key.kind())
                .setChunk(key.chunk())
                .setClockMhz(key.clockMhz())
                .setComputationCount((int) sum[0])
                .setTimeS(sum[1] / sum[0])
                .setEnergyJ(sum[2] / sum[0])));
        return estimate.build();
    }

    private List<Integer> clocksOf(PlanOffer offer) {
        return switch (offer.getClocksCase()) {
            case HOLD -> order.stream().map(unused -> offer.getHold().getClockMhz()).toList();
            case STAGE_PLAN -> offer.getStagePlan().getComputationsList().stream()
                    .map(PlannedComputation::getClockMhz)
                    .toList();
            default -> order.stream().map(unused -> 0).toList();
        };
    }

    private static boolean isSame(PlanOffer one, PlanOffer other) {
        return one.getEpoch().equals(other.getEpoch()) && one.getVersion() == other.getVersion();
    }
}
