import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import perseus.v1.Computation;
import perseus.v1.ComputationKind;

/** Emulated pipelines: they compute, wait and draw power. */
final class Training {
    static final List<Integer> CLOCKS_MHZ = List.of(1800, 1650, 1500, 1350, 1200, 1050);

    private static final double STOCK_MHZ = 1800;
    private static final double BLOCKING_POWER_W = 60;
    private static final double[] STAGE_WEIGHTS = {1, 0.7};

    private final Random random = new Random(1);
    private final Map<Integer, Double> slowdown = new HashMap<>();

    record Run(double beginS, double durationS, double energyJ) {}

    record StageIteration(double durationS, double energyJ, double blockingPowerW, List<Run> runs) {}

    private record Done(int stage, ComputationKind kind, int microbatch) {}

    /** Make a pipeline slower by `factor` from now on. */
    synchronized void slow(int pipeline, double factor) {
        slowdown.put(pipeline, factor);
    }

    /** An iteration of all pipelines, which wait for each other at its end: by pipeline and stage. */
    synchronized List<List<StageIteration>> iterate(List<List<ServedRank>> pipelines) {
        List<List<List<Run>>> timetables = new ArrayList<>();
        double endS = 0;
        for (int pipeline = 0; pipeline < pipelines.size(); pipeline++) {
            var timetable = timetable(pipelines.get(pipeline), slowdown.getOrDefault(pipeline, 1.0));
            timetables.add(timetable);
            for (List<Run> runs : timetable) {
                Run last = runs.get(runs.size() - 1);
                endS = Math.max(endS, last.beginS() + last.durationS());
            }
        }
        double durationS = endS;
        return timetables.stream()
                .map(timetable -> timetable.stream().map(runs -> measured(durationS, runs)).toList())
                .toList();
    }

    private static StageIteration measured(double durationS, List<Run> runs) {
        double busyS = runs.stream().mapToDouble(Run::durationS).sum();
        double energyJ = runs.stream().mapToDouble(Run::energyJ).sum();
        energyJ += BLOCKING_POWER_W * (durationS - busyS);
        return new StageIteration(durationS, energyJ, BLOCKING_POWER_W, runs);
    }

    /** Every computation begins after the previous one on its stage, and after its input from another stage. */
    private List<List<Run>> timetable(List<ServedRank> stages, double factor) {
        List<List<Run>> runs = new ArrayList<>();
        stages.forEach(unused -> runs.add(new ArrayList<>()));
        Map<Done, Double> endS = new HashMap<>();
        int left = stages.stream().mapToInt(rank -> rank.order().size()).sum();
        while (left > 0) {
            for (int stage = 0; stage < stages.size(); stage++) {
                ServedRank rank = stages.get(stage);
                List<Run> own = runs.get(stage);
                if (own.size() == rank.order().size()) {
                    continue;
                }
                Computation next = rank.order().get(own.size());
                boolean isForward = next.getKind() == ComputationKind.COMPUTATION_KIND_FORWARD;
                int from = isForward ? stage - 1 : stage + 1;
                boolean needsNothing = from < 0 || from == stages.size();
                var needed = new Done(from, next.getKind(), next.getMicrobatch());
                if (!needsNothing && !endS.containsKey(needed)) {
                    continue;
                }
                double neededS = needsNothing ? 0 : endS.get(needed);
                Run before = own.isEmpty() ? new Run(0, 0, 0) : own.get(own.size() - 1);
                double beginS = Math.max(neededS, before.beginS() + before.durationS());
                Run run = run(beginS, isForward, factor * STAGE_WEIGHTS[stage], rank.clocksMhz().get(own.size()));
                own.add(run);
                endS.put(new Done(stage, next.getKind(), next.getMicrobatch()), beginS + run.durationS());
                left -= 1;
            }
        }
        return runs;
    }

    private Run run(double beginS, boolean isForward, double weight, int clockMhz) {
        double mhz = clockMhz == 0 ? STOCK_MHZ : clockMhz;
        double jitter = 1 + 0.001 * (2 * random.nextDouble() - 1);
        double durationS = weight * jitter * (isForward ? 0.02 : 0.04) * (0.8 * STOCK_MHZ / mhz + 0.2);
        double powerW = 70 + 230 * Math.pow(mhz / STOCK_MHZ, 2.5);
        return new Run(beginS, durationS, powerW * durationS);
    }
}
