import io.grpc.health.v1.HealthCheckRequest;
import io.grpc.health.v1.HealthGrpc;
import io.grpc.reflection.v1alpha.ServerReflectionGrpc;
import io.grpc.reflection.v1alpha.ServerReflectionRequest;
import io.grpc.reflection.v1alpha.ServerReflectionResponse;
import io.grpc.reflection.v1alpha.ServiceResponse;
import io.grpc.stub.StreamObserver;
import java.util.ArrayList;
import java.util.List;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.Predicate;
import perseus.v1.ClearStragglerRequest;
import perseus.v1.GetReportRequest;
import perseus.v1.Gpu;
import perseus.v1.JobEvent;
import perseus.v1.JobEventType;
import perseus.v1.JobServiceGrpc;
import perseus.v1.JobSpec;
import perseus.v1.JobState;
import perseus.v1.NamedSchedule;
import perseus.v1.Parallelism;
import perseus.v1.PipelineClocks;
import perseus.v1.PlanRefusalReason;
import perseus.v1.PlannedIteration;
import perseus.v1.RankCoordinates;
import perseus.v1.RegisterJobRequest;
import perseus.v1.ReportStragglerRequest;
import perseus.v1.Schedule;
import perseus.v1.ScheduleName;
import perseus.v1.WatchJobRequest;
import perseus.v1.WatchJobResponse;

/** A job of 2 pipelines × 2 stages, from its registration to its report. Arguments: host:port, job, speed. */
final class Client {
    private static final int SLOW = 1;
    private static final double SLOWDOWN = 1.25;
    private static final long PATIENCE_S = 60;

    private final Coordinator coordinator;
    private final String jobId;
    private final double speed;
    private final JobServiceGrpc.JobServiceBlockingStub jobs;
    private final Training training = new Training();
    private final List<List<ServedRank>> pipelines = new ArrayList<>();
    private final List<JobEvent> events = new ArrayList<>();
    private final CompletableFuture<JobState> ended = new CompletableFuture<>();
    private JobState state;

    private Client(Coordinator coordinator, String jobId, double speed) {
        this.coordinator = coordinator;
        this.jobId = jobId;
        this.speed = speed;
        jobs = JobServiceGrpc.newBlockingStub(coordinator);
        for (int pipeline = 0; pipeline < 2; pipeline++) {
            pipelines.add(List.of(rank(pipeline, 0), rank(pipeline, 1)));
        }
    }

    public static void main(String[] arguments) throws Exception {
        // If any thread fails, the process fails.
        Thread.setDefaultUncaughtExceptionHandler((thread, error) -> {
            error.printStackTrace();
            System.exit(1);
        });
        var coordinator = new Coordinator(arguments[0]);
        new Client(coordinator, arguments[1], Double.parseDouble(arguments[2])).run();
        coordinator.close();
    }

    static void say(String line) {
        System.out.println(line);
    }

    private void run() throws Exception {
        var health = HealthGrpc.newBlockingStub(coordinator).withDeadlineAfter(60, TimeUnit.SECONDS);
        var request = HealthCheckRequest.newBuilder().setService("perseus.v1.AgentService").build();
        say("serving: " + health.check(request).getStatus());
        say("services: " + String.join(" ", services()));

        RegisterJobRequest registration = registration();
        coordinator.call(() -> jobs().registerJob(registration));
        watch();
        var agent = new Agent(coordinator, pipelines.stream().flatMap(List::stream).toList());
        agent.connect();
        while (!agent.areAllAccepted()) {
            Thread.sleep(10);
        }
        var isTraining = new AtomicBoolean(true);
        var trainer = new Thread(() -> train(agent, isTraining));
        trainer.setDaemon(true);
        trainer.start();

        JobEvent refused = await(0, event -> event.getType() == JobEventType.JOB_EVENT_TYPE_PLAN_REFUSED);
        check(refused.getPlanRefused().getReason() == PlanRefusalReason.PLAN_REFUSAL_REASON_PAST_START);
        say("refused in time: " + refused.getPlanRefused().getReason());

        double fastestS = 0;
        for (int pipeline = 0; pipeline < 2; pipeline++) {
            fastestS = Math.max(fastestS, awaitPlan(0, pipeline, plan -> true).getIterationTimeS());
        }
        say("planned: " + fastestS);

        double limitS = 1.02 * fastestS;
        long since = lastSequence();
        training.slow(SLOW, SLOWDOWN);
        var report = ReportStragglerRequest.newBuilder()
                .setJobId(jobId)
                .setPipeline(SLOW)
                .setSlowdownFactor(SLOWDOWN)
                .build();
        coordinator.call(() -> jobs().reportStraggler(report));
        say("answered: " + awaitPlan(since, 0, plan -> plan.getIterationTimeS() > limitS).getIterationTimeS());

        since = lastSequence();
        training.slow(SLOW, 1);
        var clear = ClearStragglerRequest.newBuilder().setJobId(jobId).setPipeline(SLOW).build();
        coordinator.call(() -> jobs().clearStraggler(clear));
        awaitPlan(since, 0, plan -> plan.getIterationTimeS() < limitS);
        say("recovered");

        isTraining.set(false);
        trainer.join();
        while (!agent.isAllAcknowledged()) {
            Thread.sleep(10);
        }
        var wanted = GetReportRequest.newBuilder().setJobId(jobId).build();
        say("report: " + coordinator.call(() -> jobs().getReport(wanted)).getPeriodsCount() + " periods");
        agent.close();
        say("job " + ended.get(PATIENCE_S, TimeUnit.SECONDS));
    }

    private JobServiceGrpc.JobServiceBlockingStub jobs() {
        return jobs.withDeadlineAfter(60, TimeUnit.SECONDS);
    }

    /** Follow the job from after its last event, until its run ends. */
    private void watch() {
        var request = WatchJobRequest.newBuilder().setJobId(jobId).setAfterSequence(lastSequence());
        JobServiceGrpc.newStub(coordinator).watchJob(request.build(), new Watch());
    }

    private ServedRank rank(int pipeline, int stage) {
        var gpu = Gpu.newBuilder()
                .setUuid("GPU-" + jobId + "-" + pipeline + "-" + stage)
                .setModel("emulated")
                .addAllSupportedClocksMhz(Training.CLOCKS_MHZ)
                .build();
        var place = RankCoordinates.newBuilder().setPipeline(pipeline).setStage(stage).build();
        return new ServedRank(jobId, place, gpu);
    }

    private RegisterJobRequest registration() {
        var schedule = NamedSchedule.newBuilder()
                .setName(ScheduleName.SCHEDULE_NAME_ONE_FORWARD_ONE_BACKWARD)
                .setMicrobatchCount(4);
        var parallelism =
                Parallelism.newBuilder().setPipelineCount(2).setStageCount(2).setTensorCount(1);
        return RegisterJobRequest.newBuilder()
                .setRequestId(UUID.randomUUID().toString())
                .setSpec(JobSpec.newBuilder()
                        .setJobId(jobId)
                        .setParallelism(parallelism)
                        .setSchedule(Schedule.newBuilder().setNamed(schedule)))
                .build();
    }

    private void train(Agent agent, AtomicBoolean isTraining) {
        try {
            for (long iteration = 0; isTraining.get(); iteration++) {
                agent.begin(iteration);
                var measured = training.iterate(pipelines);
                Thread.sleep((long) (1000 * measured.get(0).get(0).durationS() / speed));
                for (int pipeline = 0; pipeline < 2; pipeline++) {
                    for (int stage = 0; stage < 2; stage++) {
                        agent.end(pipelines.get(pipeline).get(stage), measured.get(pipeline).get(stage));
                    }
                }
            }
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }

    private List<String> services() throws Exception {
        var names = new CompletableFuture<List<String>>();
        var requests = ServerReflectionGrpc.newStub(coordinator).serverReflectionInfo(new StreamObserver<>() {
            @Override
            public void onNext(ServerReflectionResponse response) {
                var services = response.getListServicesResponse().getServiceList();
                names.complete(services.stream().map(ServiceResponse::getName).toList());
            }

            @Override
            public void onError(Throwable error) {
                names.completeExceptionally(error);
            }

            @Override
            public void onCompleted() {}
        });
        requests.onNext(ServerReflectionRequest.newBuilder().setListServices("").build());
        List<String> found = names.get(60, TimeUnit.SECONDS);
        requests.onCompleted();
        return found;
    }

    private final class Watch implements StreamObserver<WatchJobResponse> {
        @Override
        public void onNext(WatchJobResponse response) {
            if (response.hasJob()) {
                state = response.getJob().getState();
            }
            if (response.hasEvent()) {
                JobEvent event = response.getEvent();
                say("event " + event.getType() + " [" + event.getDetailsCase() + "]: " + event.getMessage());
                synchronized (events) {
                    events.add(event);
                    events.notifyAll();
                }
            }
        }

        @Override
        public void onError(Throwable error) {
            long delayMs = coordinator.follow(error) ? 0 : 500;
            CompletableFuture.delayedExecutor(delayMs, TimeUnit.MILLISECONDS).execute(Client.this::watch);
        }

        @Override
        public void onCompleted() {
            ended.complete(state);
        }
    }

    private long lastSequence() {
        synchronized (events) {
            return events.isEmpty() ? 0 : events.get(events.size() - 1).getSequence();
        }
    }

    /** The plan in force on a pipeline, from an event after `since`, if it meets a condition. */
    private PlannedIteration awaitPlan(long since, int pipeline, Predicate<PlannedIteration> condition)
            throws InterruptedException {
        JobEvent found = await(since, event -> {
            PipelineClocks clocks = event.getPipelineClocks();
            return event.getType() == JobEventType.JOB_EVENT_TYPE_PLAN_IN_FORCE
                    && clocks.getPipeline() == pipeline
                    && clocks.hasPlan()
                    && condition.test(clocks.getPlan());
        });
        return found.getPipelineClocks().getPlan();
    }

    private JobEvent await(long since, Predicate<JobEvent> condition) throws InterruptedException {
        long untilMs = System.currentTimeMillis() + 1000 * PATIENCE_S;
        synchronized (events) {
            while (true) {
                var found = events.stream()
                        .filter(event -> event.getSequence() > since)
                        .filter(condition)
                        .findFirst();
                if (found.isPresent()) {
                    return found.get();
                }
                long leftMs = untilMs - System.currentTimeMillis();
                check(leftMs > 0);
                events.wait(leftMs);
            }
        }
    }

    private static void check(boolean isTrue) {
        if (!isTrue) {
            throw new IllegalStateException("see the line above");
        }
    }
}
