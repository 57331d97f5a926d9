/* A team of threads: every member runs the same function and meets the others at barriers.

   A waiting thread spins for a bounded time. Between the stages of a pass it spins for some 50 µs, then naps; the time
   of naps is counted, since a wait far longer than any stage means that a thread was taken off its core. Between passes
   it spins for some 100 µs, then sleeps until there is work. While the team works for another run, a run takes one
   thread: results are the same.

   On Linux torch shares its operators out among libgomp's threads, which spin as well when they are done. A second team
   would wait for the cores that these spin on, so a run takes libgomp's team where the process has it. */
#define _POSIX_C_SOURCE 200809L
#include "internal.h"
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#ifndef _WIN32
#include <signal.h>
#endif

#ifdef __linux__
#pragma weak GOMP_parallel
#pragma weak omp_get_thread_num
#pragma weak omp_get_num_threads
void GOMP_parallel(void (*function)(void *), void *argument, unsigned threads, unsigned flags);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
#endif

/* Threads at most beside the calling one; pauses before a nap, and before sleep; nanoseconds of a nap. */
enum { HELPERS = 63, PATIENCE = 5000, IDLE = 10000, NAP = 20000 };

struct Meeting {
    _Alignas(64) atomic_long arrived;
    _Alignas(64) atomic_long slept; /* nanoseconds, of all members */
};

typedef void (*Function)(void *record, Member *member);
static const Function FUNCTIONS[WORKS] = {work_product, work_look_up, work_pass, work_step};

typedef struct {
    _Alignas(64) atomic_long wanted; /* runs that it was asked to take part in */
    _Alignas(64) atomic_long done;   /* runs that it has taken part in */
    atomic_int asleep;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    Function function;
    void *record;
    Member member;
} Helper;

static Helper helpers[HELPERS];
static int helper_count, forked;
static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sleep for a moment, and count how long: on a busy machine it takes far longer until the thread has a core again. */
static void nap(Meeting *meeting) {
    struct timespec before, after, time = {0, NAP};
    clock_gettime(CLOCK_MONOTONIC, &before);
    nanosleep(&time, 0);
    clock_gettime(CLOCK_MONOTONIC, &after);
    const long slept = (after.tv_sec - before.tv_sec) * 1000000000L + after.tv_nsec - before.tv_nsec;
    atomic_fetch_add_explicit(&meeting->slept, slept, memory_order_relaxed);
}

/* Wait until all members have called this. */
void meet(Member *member) {
    const long all = (long)(++member->turn * member->threads);
    atomic_fetch_add_explicit(&member->meeting->arrived, 1, memory_order_acq_rel);
    for (int looks = 0; atomic_load_explicit(&member->meeting->arrived, memory_order_acquire) < all; looks++) {
        pause_briefly();
        if (looks > PATIENCE) nap(member->meeting);
    }
}

static void *help(void *argument) {
    Helper *helper = argument;
    for (long turn = 1;; turn++) {
        for (int looks = 0; atomic_load(&helper->wanted) < turn && looks < IDLE; looks++) pause_briefly();
        if (atomic_load(&helper->wanted) < turn) {
            pthread_mutex_lock(&helper->lock);
            atomic_store_explicit(&helper->asleep, 1, memory_order_relaxed);
            atomic_thread_fence(memory_order_seq_cst);
            while (atomic_load(&helper->wanted) < turn) pthread_cond_wait(&helper->wake, &helper->lock);
            atomic_store(&helper->asleep, 0);
            pthread_mutex_unlock(&helper->lock);
        }
        helper->function(helper->record, &helper->member);
        atomic_store(&helper->done, turn);
    }
    return 0;
}

/* For a forked process, in which the helpers and libgomp's threads do not exist. */
void forget_helpers(void) {
    helper_count = 0, forked = 1;
    pthread_mutex_init(&busy, 0);
}

static int start_helper(void) {
    Helper *helper = &helpers[helper_count];
    memset(helper, 0, sizeof *helper);
    pthread_mutex_init(&helper->lock, 0);
    pthread_cond_init(&helper->wake, 0);
    pthread_t thread;
#ifndef _WIN32
    sigset_t all, before;
    sigfillset(&all); /* signals are for the interpreter's threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
    const int failed = pthread_create(&thread, 0, help, helper);
#ifndef _WIN32
    pthread_sigmask(SIG_SETMASK, &before, 0);
#endif
    if (failed) return 0;
    pthread_detach(thread);
    helper_count++;
    return 1;
}

/* Each side writes and then reads what the other one writes, so each has a fence between. Without it QEMU 7.2, which
   lets a load overtake an `stlr`, at times missed both writes, and the helper slept for ever. */
static void ask(Helper *helper, long turn) {
    atomic_store_explicit(&helper->wanted, turn, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&helper->asleep, memory_order_relaxed)) {
        pthread_mutex_lock(&helper->lock);
        pthread_cond_signal(&helper->wake);
        pthread_mutex_unlock(&helper->lock);
    }
}

/* Run the function on this file's helpers and the calling thread. */
static void run_helpers(Function function, void *record, int64_t threads, Meeting *meeting) {
    static long turn[HELPERS];
    if (threads > HELPERS + 1) threads = HELPERS + 1;
    while (helper_count < threads - 1 && start_helper()) turn[helper_count - 1] = 0;
    if (helper_count < threads - 1) threads = helper_count + 1;
    for (int i = 0; i < threads - 1; i++) {
        helpers[i].function = function, helpers[i].record = record;
        helpers[i].member = (Member){i + 1, threads, 0, meeting};
        ask(&helpers[i], ++turn[i]);
    }
    Member member = {0, threads, 0, meeting};
    function(record, &member);
    for (int i = 0; i < threads - 1; i++)
        for (int looks = 0; atomic_load(&helpers[i].done) < turn[i]; looks++) {
            pause_briefly();
            if (looks > PATIENCE) nap(meeting);
        }
}

#ifdef __linux__
typedef struct {
    Function function;
    void *record;
    Meeting *meeting;
} Job;

static void take_part(void *argument) {
    const Job *job = argument;
    Member member = {omp_get_thread_num(), omp_get_num_threads(), 0, job->meeting};
    job->function(job->record, &member);
}

/* The same on libgomp's team; return whether there is one. */
static int run_torch_team(Function function, void *record, int64_t threads, Meeting *meeting) {
    if (forked || !GOMP_parallel || !omp_get_thread_num || !omp_get_num_threads) return 0;
    Job job = {function, record, meeting};
    GOMP_parallel(take_part, &job, (unsigned)threads, 0);
    return 1;
}
#else
static int run_torch_team(Function function, void *record, int64_t threads, Meeting *meeting) {
    (void)function, (void)record, (void)threads, (void)meeting;
    return 0;
}
#endif

/* Do the work on up to `threads` threads; once all are done, return the nanoseconds that they slept, added up. */
int64_t run(int64_t work, void *record, int64_t threads) {
    Meeting meeting = {0};
    const Function function = FUNCTIONS[work];
    if (threads <= 1 || pthread_mutex_trylock(&busy) != 0) {
        Member member = {0, 1, 0, &meeting};
        function(record, &member);
        return 0;
    }
    if (!run_torch_team(function, record, threads, &meeting)) run_helpers(function, record, threads, &meeting);
    pthread_mutex_unlock(&busy);
    return atomic_load(&meeting.slept);
}
