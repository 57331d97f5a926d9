/* The structures that Python hands to the kernels, and the types of weights. utils/kernels/header.py reads this text.

   16 rows of a weight [rows, width], which are columns of the product, lie side by side, so that one vector serves 16
   of them. They take at most a twentieth more than in their GGUF file:

       [rows / 16][width / block] blocks of `block` numbers a row, each a header and block / 32 groups

   A code is the integer that is stored for a number; scales and minimums turn it into that number. A group is 16
   columns times 32 codes: its scales, lines of low bits, lines of high bits. A line is 64 bytes, four for each column.
   "Quad" q of a group is the codes 4q to 4q + 3 of each column, which one integer instruction multiplies.

       8 bits: line q has quad q
       4 bits: line l has quad l in its low nibbles and quad 4 + l in its high ones
       2 bits: line l has quad 2s + l in bits 2s and 2s + 1
       1 bit:  the line has quad q in bit q

   Types whose file has a scale for 32 codes keep it (and the minimum) as a half (16-bit float) of each column in the
   group. K types and IQ4_XS keep halves for 256 codes in the header and bytes, which multiply these, in the group. F32,
   F16 and BF16 lie [rows / 16][width][16]. */
#ifndef KERNELS_H
#define KERNELS_H
#include <stdint.h>

/* TILE: rows of a product that are computed at once. FEW: a pass of at most so many rows is normed by every thread for
   itself. TABLES: of rotary angles, at most. MOST_CHOSEN: experts of a row, at most. */
enum { COLUMNS = 16, GROUP = 32, TILE = 8, FEW = 4, TABLES = 4, MOST_CHOSEN = 32 };
/* The types of weights, one a row, in GGUF's names. The columns: bits of a code in the low lines, in the high lines,
   and as a product takes it; what is added to each code, so that none is negative; scales of a group, whether each has
   a minimum; bytes of a group before its lines; bytes of a block before its groups, number of groups; whether codes
   stand for the numbers of a table; numbers and bytes of a block in a file. */
#define BLOCK_TYPES(ROW)                                    \
    ROW(Q4_0, 4, 0, 4, 8, 1, 0, 32, 0, 1, 0, 32, 18)        \
    ROW(Q4_1, 4, 0, 4, 0, 1, 1, 64, 0, 1, 0, 32, 20)        \
    ROW(Q5_0, 4, 1, 5, 16, 1, 0, 32, 0, 1, 0, 32, 22)       \
    ROW(Q5_1, 4, 1, 5, 0, 1, 1, 64, 0, 1, 0, 32, 24)        \
    ROW(Q8_0, 8, 0, 8, 128, 1, 0, 32, 0, 1, 0, 32, 34)      \
    ROW(Q2_K, 2, 0, 2, 0, 2, 1, 32, 64, 8, 0, 256, 84)      \
    ROW(Q3_K, 2, 1, 3, 4, 2, 0, 32, 32, 8, 0, 256, 110)     \
    ROW(Q4_K, 4, 0, 4, 0, 1, 1, 32, 64, 8, 0, 256, 144)     \
    ROW(Q5_K, 4, 1, 5, 0, 1, 1, 32, 64, 8, 0, 256, 176)     \
    ROW(Q6_K, 4, 2, 6, 32, 2, 0, 32, 32, 8, 0, 256, 210)    \
    ROW(IQ4_NL, 4, 0, 8, 128, 1, 0, 32, 0, 1, 1, 32, 18)    \
    ROW(IQ4_XS, 4, 0, 8, 128, 1, 0, 16, 32, 8, 1, 256, 136)
#define FLOAT_TYPES(ROW)                                    \
    ROW(F32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 4)            \
    ROW(F16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2)            \
    ROW(BF16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2)
#define NAME(name, ...) name,
enum Type { BLOCK_TYPES(NAME) FLOAT_TYPES(NAME) TYPES };
enum Activation { SILU, GELU_TANH };
enum Work { PRODUCT, LOOK_UP, PASS, STEP, WORKS };

typedef struct {
    const uint8_t *data;
    int64_t type, rows, width;
    const float *bias; /* NULL: none */
} Weight;

/* One group of a row that enters a product: x = scale * (256 * high + low), or scale * high where it is narrow, of 8
   bits. Some processors keep 16-bit codes whole, in the memory of both arrays (WORDS in internal.h). */
typedef struct {
    int8_t high[GROUP], low[GROUP];
    float scale[2], sum; /* of the first and of the last 16 codes, the same where they have 16 bits; their sum, scaled */
    int32_t count[2];    /* the sums of the first and of the last 16 codes */
} Codes;

/* Rows that enter products: codes in tiles of up to 8 rows, [tile][group][row of the tile], and floats [row][width]
   for weights that are floats; either may be NULL. */
typedef struct {
    Codes *codes;
    float *floats;
} Input;

/* y = x W^T + bias of float rows. */
typedef struct {
    Weight weight;
    int64_t count, narrow;
    const float *x;
    float *y; /* [count][weight.rows rounded up to 16] */
    Input input;
} Product;

/* Rows of a weight as floats. */
typedef struct {
    Weight weight;
    int64_t count;
    const int64_t *ids;
    float *y; /* [count][weight.width] */
} LookUp;

/* A token of a pass, whose key and value go to place `slot` of the cache. It sees the first `seen` slots of its
   sequence, then the `count` slots in the list `more`; where a layer has a window, only the last of all these. */
typedef struct {
    int64_t id, position, sequence, slot, seen;
    const int64_t *more;
    int64_t count;
} Row;

typedef struct {
    Weight gate, up, down;
} Expert;

/* A row that an expert computes, and the factor of its result. */
typedef struct {
    int64_t row;
    float share, unused;
} Pick;

/* The norms: before attention, after it, between it and the MLP, after the MLP, of queries, of keys. The address of a
   norm's weight is NULL where the model has no such norm. */
typedef struct {
    Weight q, k, v, o, gate, up, down, router, shared_gate;
    const float *before, *after_attention, *between, *after_mlp, *q_norm, *k_norm;
    const Expert *experts; /* NULL: an MLP of gate, up and down. The routed experts, then the shared one */
    float *states;         /* where to keep what enters the layer; NULL: nowhere */
    int64_t window;        /* tokens seen at most; 0: all */
    int64_t table;         /* of the rotary angles; -1: none */
    int64_t wide_norm;     /* q_norm and k_norm are those of all heads together */
} Layer;

typedef struct {
    /* sizes; inner: of the MLP; heads: of queries; shared: heads of keys; size: numbers of a head; rotary_dim: those of
       them that are rotated */
    int64_t layers, hidden, inner, heads, shared, size, rotary_dim;
    /* of a mixture; common: the shared expert's inner size, 0 without; rescaled: whether the chosen ones' shares sum to
       1 */
    int64_t experts, chosen, expert_inner, common, rescaled;
    /* facts; narrow: activations have 8 bits, not 16; half: the cache's numbers have 16 bits; scale: of queries; a cap
       of 0: none */
    int64_t activation, narrow, half;
    float epsilon, scale, embed_scale, residual_scale, logit_scale, logit_cap, attention_cap, unused;
    Weight embed, head;
    const float *norm;
    const Layer *layer;
    const float *tables[TABLES]; /* cos and sin of every position [positions][rotary_dim] */
    /* the rows of this pass: `fed` of each sequence, the last `kept` of which get logits */
    int64_t rows, fed, kept;
    const Row *row;
    /* the cache: keys [layer][sequence][shared][slots / 16][size][16], values [layer][sequence][shared][slots][size] */
    int64_t batch, slots;
    uint8_t *keys, *values;
    int64_t moved;
    const int64_t *moves; /* of each: sequence, from slot, to slot */
    /* results; states_row: numbers of a row of states */
    float *logits, *states;
    int64_t states_row;
    /* memory to work in; every thread has its own `scores` and `buffer`, and in a pass of up to FEW rows `normed` */
    float *x, *qkv, *side;
    Input normed, mixed, gated;
    int64_t normed_codes, normed_floats; /* of one thread */
    float *scores, *buffer;
    int64_t scores_row, scores_size, buffer_size; /* numbers: of a query's scores, and of one thread */
    /* of a mixture: the routers' results, the experts' picks one expert after another and where each one's begin, and
       what enters the experts */
    float *route;
    Pick *picks;
    int64_t *first;
    Input routed;
} Pass;

/* A feature head's pass: a token's embedding and the state before it are joined into x. "theirs" is of the target's
   states, of `parts` layers beside each other, "own" of the head's. */
typedef struct {
    Pass pass;
    int64_t large, parts; /* numbers of a layer's state; layers */
    const float *table;   /* the embedding where it is no packed weight */
    const int64_t *kinds; /* of each row, whose state is before it: 0 nobody's, 1 the target's, 2 the head's */
    const float *const *states_before;
    int64_t any_theirs, any_own; /* whether a row has kind 1; kind 2 */
    const float *embed_norm, *theirs_norm, *own_norm;
    Weight join, join_theirs, join_own;
    Codes *entered, *theirs, *own;
} Step;

enum { MOST = 16 };

/* The facts about one position's `count` logits that a round needs: the `most` largest (`ids`, `values`), and the id
   that is drawn with the noise of `state`, or the largest without `draws` (-1: undecided). `inverse` is 1 /
   temperature, `mass` the sum of e^(logit - largest) (0 until summed up), `tempered` the same at the temperature of a
   draw. Filters that are 0 are off; they leave `kept` ids (-1: not known), and `tempered` is the sum over these. */
typedef struct {
    const float *logits;
    int64_t count, most, draws;
    uint64_t state;
    int64_t drawn, rival_count, top_k, kept;
    float inverse, mass, tempered, top_p, min_p, unused;
    int64_t ids[MOST];
    float values[MOST];
} Walk;

/* A walk from node `begin` of a draft (-1: the root) down to the first node of which no child is drawn, or at which the
   draw is undecided. `descend` returns the number of nodes on the path. */
typedef struct {
    const float *logits; /* of the root, then of each node, `stride` numbers apart */
    int64_t stride, count, most, draws, top_k;
    float inverse, top_p, min_p, unused;
    uint64_t key;     /* of the noise of the row */
    int64_t position; /* of the first draw */
    int64_t nodes;
    const int64_t *tokens, *parents;
    int64_t begin;
    int64_t *path;
    Walk *walks;
} Descent;

enum { CONTEXT = 16, OFFERED = 128 };

/* The entries of an n-gram table with contexts of one size, sorted by key, the likeliest token of a key first.
   `confidence`: its probability in 255ths. */
typedef struct {
    const uint32_t *keys;
    const uint8_t *tokens, *confidence;
    int64_t count, token_bytes;
} TableLevel;

/* A token that is offered: `prob` by its source; p: times the chance that all offers before are wrong. */
typedef struct {
    int64_t token, source;
    double p, prob;
} Offer;

/* The tokens that matches in a row of `length` tokens and n-gram tables offer after a path, beside those of other
   sources; and these pooled with a model's. The noise of the draw after the path, at `temperature` (0: none),
   multiplies each p, by e^most_noise at most and to no more than most_prob. */
typedef struct {
    int64_t longest;      /* tokens of a match at most, 0: no matches */
    const double *chance; /* that a match is right, by its number of tokens */
    int64_t match_source;
    const TableLevel *levels;
    int64_t sizes, most, end, table_source; /* `most` tokens of a context, below id `end`; sizes 0: no tables */
    double noise_share, pooled_share, most_noise, noise_mean, most_prob, listed, sharpening, unlisted;
    const double *trust; /* in each source */
    int64_t model;       /* its index */
    const int64_t *row;
    int64_t length, size, known, found; /* size: of the tail; found: the offers given, `known` before the model's */
    uint64_t key;                       /* of the row's noise */
    int64_t position;                   /* of the draw */
    double temperature;
    int64_t tail[CONTEXT]; /* the last tokens of the path */
    Offer offers[OFFERED];
} Offers;

int64_t run(int64_t work, void *record, int64_t threads);
void forget_helpers(void);
void pack(int64_t type, const uint8_t *file, int64_t rows, int64_t width, uint8_t *data, int64_t first, int64_t last);
void walk(Walk *walk);
void sum_up(Walk *walk);
int64_t descend(const Descent *descent);
int64_t find_offers(Offers *offers);
int64_t pool_offers(Offers *offers);
void over_noise(uint64_t state, int64_t count, const float *probs, float *result);
int64_t packed_size(int64_t type, int64_t rows, int64_t width);
#endif
