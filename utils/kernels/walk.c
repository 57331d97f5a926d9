/* A walk reads one position's logits for a round: the largest few, the denominator of the softmax, and the id that is
   drawn with known noise.

   The noise is the SplitMix64 stream of sampling/sampler.py, the draw the largest p / E of its exponential race. Here p
   and E are rounded otherwise than there, so a race that two ids lead within NEAR of each other is left undecided. */
#include "internal.h"
#include <math.h>

/* Capacities: ids that may win a draw; logits of a block; ids that filters may leave. */
enum { RIVALS = 256, BLOCK = 256, KEPT = 4096 };
static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
static const double NEAR = 1e-4;                 /* relative distance of two quotients that is left undecided */
static const double ROUNDING = 4e-6;             /* a sum of probabilities in 32 bits may be off by less */
static const float LARGEST_UNIFORM = 1.0f - 0x1p-24f; /* the largest float below 1 */

/* Mix a word of the stream, but for the last step, which leaves the upper 31 bits as they are. */
#define MIXED(word) \
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u; \
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu

/* Uniform number `index` of the stream in this state. */
static double uniform(uint64_t state, int64_t index) {
    uint64_t word = state + (uint64_t)(index + 1) * GOLDEN;
    MIXED(word);
    return ((double)((word ^ (word >> 31)) >> 12) + 0.5) * 0x1p-52;
}

uint64_t part(uint64_t key, int64_t more) {
    uint64_t word = key + (uint64_t)(more + 1) * GOLDEN;
    MIXED(word);
    return word ^ (word >> 31);
}

double gumbel(uint64_t state, int64_t id) { return -log(-log1p(-uniform(state, id))); }

typedef uint64_t Words __attribute__((vector_size(64)));

/* The uniform numbers of these eight words and of the next eight, rounded down to 31 bits, then to a nearest float. */
static Reals from_below(Words first) {
    Words second = first + 8 * GOLDEN;
    MIXED(first);
    MIXED(second);
    Bits both = __builtin_shufflevector((Bits)(first >> 33), (Bits)(second >> 33), 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return __builtin_convertvector((Wholes)both, Reals) * 0x1p-31f;
}

static Reals load_at(const float *x, int64_t at) { return load(x + at); }

/* Find the `most` largest logits, of equal ones the first id first. If fewer are above -inf, the other ids are -1; if a
   logit is NaN or +inf, the first id is -1 too. */
static void find_largest(Walk *w) {
    const int64_t last = w->most - 1;
    Wholes undefined = {0};
    for (int64_t at = 0; at < w->most; at++) w->ids[at] = -1, w->values[at] = -INFINITY;
    for (int64_t start = 0; start < w->count; start += BLOCK) {
        const int64_t end = w->count - start < BLOCK ? w->count : start + BLOCK;
        Reals top = load_at(w->logits, start);
        undefined |= (Wholes)(top != top);
        for (int64_t at = start + WIDTH; at < end; at += WIDTH) {
            Reals next = load_at(w->logits, at);
            undefined |= (Wholes)(next != next);
            top = larger(top, next);
        }
        if (largest(top) <= w->values[last]) continue;
        for (int64_t id = start; id < end; id++) {
            const float value = w->logits[id];
            if (!(value > w->values[last])) continue;
            int64_t at = last;
            for (; at > 0 && w->values[at - 1] < value; at--) w->values[at] = w->values[at - 1], w->ids[at] = w->ids[at - 1];
            w->values[at] = value, w->ids[at] = id;
        }
    }
    if (most_of((Bits)undefined) || w->values[0] == INFINITY) w->ids[0] = -1;
}

/* Σ exp((logit - largest) * inverse). */
static float sum_of(const Walk *w, float inverse) {
    Reals top = splat(w->values[0]);
    double sum = 0.0;
    for (int64_t start = 0; start < w->count; start += BLOCK) {
        const int64_t end = w->count - start < BLOCK ? w->count : start + BLOCK;
        Reals mass = splat(0.0f);
        for (int64_t at = start; at < end; at += WIDTH) mass += exponential((load_at(w->logits, at) - top) * inverse);
        sum += (double)total(mass);
    }
    return (float)sum;
}

/* Sum up at the draw's temperature, and collect the `rivals`, which may win the race p / E. Most ids are excluded by
   u < E < u / (1 - u) alone, with u from `least` to `least` + 2^-31; NEAR is wider than what floats round. */
static void collect(Walk *w, int64_t *rivals) {
    float weights[BLOCK], least[BLOCK];
    Reals top = splat(w->values[0]), tempered = splat(0.0f);
    float best = 0.0f, bound = 0.0f;
    Words word = (Words){1, 2, 3, 4, 5, 6, 7, 8} * GOLDEN + w->state;
    w->rival_count = 0;
    for (int64_t start = 0; start < w->count; start += BLOCK) {
        const int64_t size = w->count - start < BLOCK ? w->count - start : BLOCK;
        Wholes may_win = {0};
        for (int64_t at = 0; at < size; at += WIDTH, word += WIDTH * GOLDEN) {
            Reals number = from_below(word), weight = exponential((load_at(w->logits, start + at) - top) * w->inverse);
            tempered += weight;
            may_win |= (Wholes)(weight > number * bound);
            store(least + at, number), store(weights + at, weight);
        }
        if (!most_of((Bits)may_win)) continue;
        for (int64_t at = 0; at < size; at++) {
            const float upper = least[at] + 0x1p-31f, quotient = weights[at] / upper - weights[at]; /* or more */
            best = quotient > best ? quotient : best;
        }
        bound = best * (float)(1 - NEAR);
        for (int64_t at = 0; at < size; at++)
            if (weights[at] > least[at] * bound && w->rival_count < RIVALS) rivals[w->rival_count++] = start + at;
    }
    w->tempered = total(tempered);
}

/* Decide the race among the rivals: `drawn` is -1 if the first two are too near, or if all of `room` is taken. */
static void decide(Walk *w, const int64_t *rivals, int64_t room) {
    double first = -1.0, second = -1.0;
    w->drawn = -1;
    for (int64_t at = 0; at < w->rival_count; at++) {
        const int64_t id = rivals[at];
        float noise = (float)uniform(w->state, id);
        noise = noise < LARGEST_UNIFORM ? noise : LARGEST_UNIFORM;
        const double below_largest = (double)w->logits[id] - (double)w->values[0];
        const double quotient = exp(below_largest * (double)w->inverse) / -log1p(-(double)noise);
        if (quotient > first)
            second = first, first = quotient, w->drawn = id;
        else if (quotient > second)
            second = quotient;
    }
    if (second >= first * (1 - NEAR) || w->rival_count == room) w->drawn = -1;
}

typedef struct {
    float logit;
    int32_t id;
} Entry;

/* Whether a is before b: the largest logit first, and the first of equal ones. */
static int before(Entry a, Entry b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

/* Sift an entry of a heap down. On top is the entry before all others, or with `last` the one after all others. */
static void sink(Entry *heap, int64_t count, int64_t at, int last) {
    for (int64_t child = 2 * at + 1; child < count; at = child, child = 2 * at + 1) {
        if (child + 1 < count && before(heap[child + 1], heap[child]) != last) child++;
        if (before(heap[at], heap[child]) != last) return;
        const Entry above = heap[at];
        heap[at] = heap[child], heap[child] = above;
    }
}

/* Whether a logit in the block from `start` on is at least `floor`. */
static int reaches(const Walk *w, int64_t start, int64_t end, float floor) {
    Reals top = load_at(w->logits, start);
    for (int64_t at = start + WIDTH; at < end; at += WIDTH) top = larger(top, load_at(w->logits, at));
    return largest(top) >= floor;
}

/* The top_k-th largest logit. */
static float top_k_floor(const Walk *w, Entry *heap) {
    int64_t have = 0;
    for (int64_t start = 0; start < w->count; start += BLOCK) {
        const int64_t end = w->count - start < BLOCK ? w->count : start + BLOCK;
        if (have == w->top_k && !reaches(w, start, end, heap[0].logit)) continue;
        for (int64_t id = start; id < end; id++) {
            const Entry entry = {w->logits[id], (int32_t)id};
            if (have < w->top_k) {
                heap[have++] = entry;
                if (have == w->top_k)
                    for (int64_t at = have / 2; at-- > 0;) sink(heap, have, at, 1);
            } else if (before(entry, heap[0])) {
                heap[0] = entry;
                sink(heap, have, 0, 1);
            }
        }
    }
    return heap[0].logit;
}

/* Collect the ids with logits of at least `floor`; return how many, -1 if more than KEPT. */
static int64_t ids_from(const Walk *w, float floor, Entry *entries) {
    int64_t have = 0;
    for (int64_t start = 0; start < w->count; start += BLOCK) {
        const int64_t end = w->count - start < BLOCK ? w->count : start + BLOCK;
        if (!reaches(w, start, end, floor)) continue;
        for (int64_t id = start; id < end; id++) {
            if (w->logits[id] < floor) continue;
            if (have == KEPT) return -1;
            entries[have++] = (Entry){w->logits[id], (int32_t)id};
        }
    }
    return have;
}

static double weight_of(const Walk *w, Entry entry) {
    return exp(((double)entry.logit - (double)w->values[0]) * (double)w->inverse);
}

/* The logit of an id with `share` times the largest probability, or a little less. */
static float logit_of(const Walk *w, double share) {
    return (float)((double)w->values[0] + log(share) / (double)w->inverse) - 1e-3f;
}

/* Collect the ids that the filters can leave, as a heap with the likeliest on top, and in `sum` the weight of the ids
   to which top-p applies (1 under min-p alone); return how many, -1 if more than KEPT. */
static int64_t candidates(const Walk *w, Entry *entries, double *sum) {
    int64_t count;
    if (w->top_k > 0 && w->top_k < w->count) {
        if (w->top_k > KEPT) return -1;
        count = ids_from(w, top_k_floor(w, entries), entries);
        *sum = 0.0;
        for (int64_t at = 0; at < count; at++) *sum += weight_of(w, entries[at]);
    } else if (w->top_p > 0) {
        const double rest = 1 - (double)w->top_p;
        /* `least` is lowered until the ids have the mass; all those below rest / count have less than rest. */
        double mass, least = rest / 64;
        *sum = (double)sum_of(w, w->inverse);
        do {
            count = ids_from(w, logit_of(w, least * *sum), entries), mass = 0.0;
            for (int64_t at = 0; at < count; at++) mass += weight_of(w, entries[at]);
        } while (count >= 0 && mass < (1 - rest + 2 * ROUNDING) * *sum && least > rest / (double)w->count && (least /= 16));
    } else {
        count = ids_from(w, logit_of(w, (double)w->min_p), entries), *sum = 1.0;
    }
    for (int64_t at = count / 2; at-- > 0;) sink(entries, count, at, 0);
    return count;
}

/* The draw among the ids that top-k, then top-p, then min-p leave (utils/logits_processors.py). Undecided (-1) if
   rounding decides whether the winner is left, or whether ids with 1e-5 of the weight are; and if KEPT or more may be
   left. */
static void draw_filtered(Walk *w) {
    Entry entries[KEPT];
    int64_t left[KEPT], kept = 0, sure = KEPT;
    double sum, mass = 0.0, unsure = 0.0;
    w->drawn = -1, w->kept = -1;
    for (int64_t count = candidates(w, entries, &sum); count > 0; sink(entries, count, 0, 0), kept++) {
        const double weight = weight_of(w, entries[0]);
        const double over = w->top_p > 0 ? mass / sum - (double)w->top_p : -1.0;
        const double under = w->min_p > 0 ? 1 - weight / (double)w->min_p : -1.0;
        if (over >= ROUNDING || under >= ROUNDING) break;
        if (over > -ROUNDING || under > -ROUNDING) {
            sure = kept < sure ? kept : sure, unsure += weight;
            if (unsure > 1e-5 * sum) return;
        }
        left[kept] = entries[0].id, mass += weight;
        entries[0] = entries[--count];
    }
    if (!kept) return;
    w->tempered = (float)mass, w->rival_count = w->kept = kept;
    decide(w, left, KEPT);
    for (int64_t at = sure; at < kept; at++)
        if (left[at] == w->drawn) w->drawn = -1;
}

/* Find the largest logits and the id that is drawn: the winner of the race, or without `draws` the largest. */
static void draw(Walk *w) {
    find_largest(w);
    w->drawn = w->ids[0];
    w->mass = w->drawn < 0 ? NAN : 0.0f;
    w->kept = w->count;
    if (w->drawn < 0 || !w->draws) return;
    if (w->top_k > 0 || w->top_p > 0 || w->min_p > 0) {
        draw_filtered(w);
    } else {
        int64_t rivals[RIVALS];
        collect(w, rivals);
        decide(w, rivals, RIVALS);
    }
}

void sum_up(Walk *w) { w->mass = sum_of(w, 1.0f); }

void walk(Walk *w) {
    draw(w);
    if (w->ids[0] >= 0) sum_up(w);
}

int64_t descend(const Descent *d) {
    int64_t stood = 0;
    for (int64_t node = d->begin, child = 0; child >= 0; node = child) {
        Walk *w = d->walks + stood;
        w->logits = d->logits + (node + 1) * d->stride;
        w->count = d->count, w->most = d->most, w->draws = d->draws, w->inverse = d->inverse;
        w->top_k = d->top_k, w->top_p = d->top_p, w->min_p = d->min_p;
        w->state = part(d->key, d->position + stood);
        d->path[stood++] = node;
        draw(w);
        child = -1;
        for (int64_t at = node + 1; at < d->nodes && child < 0 && w->drawn >= 0; at++)
            if (d->parents[at] == node && d->tokens[at] == w->drawn) child = at;
    }
    return stood;
}

/* Probabilities divided by the uniform numbers of the stream in this state. */
void over_noise(uint64_t state, int64_t count, const float *probs, float *result) {
    for (int64_t at = 0; at < count; at++) result[at] = probs[at] / (float)uniform(state, at);
}
