/* Handlers and threads on stacks that are far memory, faults that the program handles itself, threads that are stopped by signals. */
#include "../../../netvm-preload/tests/c/check.h"
#include <setjmp.h>
#include <sys/time.h>
#include <semaphore.h>
#include <ucontext.h>

#define BYTES (16 * MIB)

static char *area;

static void push_out(void) {
    static char *other;
    if (!other) other = anonymous(BYTES);
    fill(other, BYTES, 77);
    CHECK(holds(other, BYTES, 77));
}

static volatile sig_atomic_t ticks;

static void on_tick(int signal) {
    char stack[20000];
    memset(stack, signal, sizeof stack);
    ticks += stack[ticks % sizeof stack] != 0;
}

/* Signals come all the time, on a stack that is far memory, while the program forks. */
static void forks_with_signals(void) {
    stack_t stack = {.ss_sp = anonymous(MIB), .ss_size = MIB};
    CHECK(sigaltstack(&stack, NULL) == 0);
    struct sigaction action = {.sa_handler = on_tick, .sa_flags = SA_ONSTACK | SA_RESTART};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    struct itimerval often = {{0, 300}, {0, 300}}, never = {{0, 0}, {0, 0}};
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    for (int i = 0; i < 40; i++) {
        CHECK(madvise(stack.ss_sp, MIB - 8 * PAGE, MADV_DONTNEED) == 0);
        sigset_t before, after;
        CHECK(sigprocmask(SIG_SETMASK, NULL, &before) == 0);
        pid_t pid = fork();
        CHECK(pid >= 0);
        CHECK(sigprocmask(SIG_SETMASK, NULL, &after) == 0 && sigismember(&after, SIGALRM) == sigismember(&before, SIGALRM));
        if (pid == 0) {
            raise(SIGALRM);
            area[i * PAGE] ^= 1;
            _exit(ticks > 0 ? 0 : 1);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    }
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0 && ticks > 0);
    stack.ss_flags = SS_DISABLE;
    CHECK(sigaltstack(&stack, NULL) == 0 && holds(area, BYTES, 1));
}

static int recurse(int depth) {
    volatile char frame[4096];
    memset((char *)frame, depth, sizeof frame);
    return depth == 0 ? 0 : frame[17] - (char)depth + recurse(depth - 1);
}

static void fork_here(void) {
    push_out();
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        CHECK(recurse(200) == 0 && holds(area, BYTES, 1));
        _exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0 && recurse(200) == 0);
}

static void *on_thread(void *argument) {
    fork_here();
    return argument;
}

static ucontext_t main_context;

/* A thread and a coroutine fork on far stacks. */
static void far_stacks(void) {
    char *stack = anonymous(4 * MIB);
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    CHECK(pthread_attr_setstack(&attributes, stack, 2 * MIB) == 0);
    for (int i = 0; i < 3; i++) CHECK(!pthread_create(&thread, &attributes, on_thread, NULL) && !pthread_join(thread, NULL));
    ucontext_t context;
    CHECK(getcontext(&context) == 0);
    context.uc_stack.ss_sp = stack + 2 * MIB;
    context.uc_stack.ss_size = 2 * MIB;
    context.uc_link = &main_context;
    makecontext(&context, fork_here, 0);
    CHECK(swapcontext(&main_context, &context) == 0);
    CHECK(munmap(stack, 4 * MIB) == 0);
}

static volatile sig_atomic_t barriers;
static sigjmp_buf back;

static void on_fault(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    char *at = (char *)((uintptr_t)info->si_addr & ~(PAGE - 1));
    if (at < area || at >= area + BYTES) siglongjmp(back, 1);
    barriers++;
    if (mprotect(at, PAGE, PROT_READ | PROT_WRITE)) _exit(3);
}

/* Write barriers by mprotect and SIGSEGV, as collectors and checkpoints have them, on a far signal stack. */
static void barriers_by_faults(void) {
    stack_t stack = {.ss_sp = anonymous(MIB), .ss_size = MIB};
    CHECK(sigaltstack(&stack, NULL) == 0);
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_ONSTACK | SA_SIGINFO};
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0 && sigaction(SIGBUS, &action, NULL) == 0);
    CHECK(mprotect(area, BYTES, PROT_READ) == 0);
    push_out();
    for (size_t at = 0; at < BYTES; at += 8 * PAGE) area[at] ^= 1;
    CHECK(barriers == BYTES / PAGE / 8);
    for (size_t at = 0; at < BYTES; at += 8 * PAGE) area[at] ^= 1;
    CHECK(barriers == BYTES / PAGE / 8 && mprotect(area, BYTES, PROT_READ | PROT_WRITE) == 0 && holds(area, BYTES, 1));
    if (!sigsetjmp(back, 1)) {
        *(volatile char *)64 = 1;
        CHECK(!"there is nothing");
    }
    /* A file that is too short, mapped in the middle of far memory: SIGBUS is the program's. */
    char name[] = "/tmp/netvm-signals-XXXXXX";
    int fd = mkstemp(name);
    char *p = anonymous(4 * MIB);
    CHECK(fd >= 0 && unlink(name) == 0);
    CHECK(mmap(p + MIB, MIB, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == p + MIB);
    if (!sigsetjmp(back, 1)) {
        (void)*(volatile char *)(p + MIB);
        CHECK(!"the file is empty");
    }
    CHECK(munmap(p, 4 * MIB) == 0 && close(fd) == 0);
    signal(SIGSEGV, SIG_DFL);
    signal(SIGBUS, SIG_DFL);
    stack.ss_flags = SS_DISABLE;
    CHECK(sigaltstack(&stack, NULL) == 0);
}

static sem_t stopped;
static volatile int go_on, end;

static void on_stop(int signal) {
    (void)signal;
    sem_post(&stopped);
    while (!go_on) usleep(50);
    sem_post(&stopped);
}

static void *maps(void *argument) {
    for (int i = 0; !end; i++) {
        char *p = anonymous(MIB / 2);
        memset(p, i, 3 * PAGE);
        char *q = malloc(400000);
        memset(q, i, 2 * PAGE);
        CHECK(p[2 * PAGE] == (char)i && q[PAGE] == (char)i && munmap(p, MIB / 2) == 0);
        free(q);
    }
    return argument;
}

/* Threads are stopped by a signal wherever they are, and memory is mapped meanwhile, as collectors do. */
static void stops_the_world(void) {
    pthread_t threads[3];
    struct sigaction action = {.sa_handler = on_stop, .sa_flags = SA_RESTART};
    CHECK(sem_init(&stopped, 0, 0) == 0 && sigaction(SIGUSR1, &action, NULL) == 0);
    for (int i = 0; i < 3; i++) CHECK(!pthread_create(&threads[i], NULL, maps, NULL));
    for (int round = 0; round < 150; round++) {
        go_on = 0;
        for (int i = 0; i < 3; i++) CHECK(pthread_kill(threads[i], SIGUSR1) == 0);
        for (int i = 0; i < 3; i++) while (sem_wait(&stopped)) CHECK(errno == EINTR);
        char *p = anonymous(MIB);
        fill(p, 4 * PAGE, round);
        CHECK(mprotect(p, MIB, PROT_READ) == 0 && madvise(p + 8 * PAGE, PAGE, MADV_DONTNEED) == 0 && holds(p, 4 * PAGE, round));
        CHECK(munmap(p, MIB) == 0);
        go_on = 1;
        for (int i = 0; i < 3; i++) while (sem_wait(&stopped)) CHECK(errno == EINTR);
    }
    end = 1;
    for (int i = 0; i < 3; i++) CHECK(!pthread_join(threads[i], NULL));
}

static void *goes_on(void *argument) {
    usleep(20000);
    for (int i = 0; i < 3; i++) fork_here();
    CHECK(holds(area, BYTES, 1));
    puts("ok");
    exit(0);
    return argument;
}

int main(void) {
    area = anonymous(BYTES);
    fill(area, BYTES, 1);
    CHECK(holds(area, BYTES, 1));
    forks_with_signals();
    far_stacks();
    barriers_by_faults();
    stops_the_world();
    /* The first thread ends, the process does not. */
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, goes_on, NULL));
    pthread_exit(NULL);
}
