/* A mixture of experts: every row goes through the few experts that its router chooses, and through the shared one if
   the model has one.

   The rows of an expert are its picks; they lie beside each other, so that its weights are read once for all of them. A
   row's experts are added in the order of their numbers, so its result depends on the row alone. */
#include "internal.h"

/* Numbers of a row of routers' results: the router's, then the shared expert's gate. */
static int64_t route_row(const Pass *p) { return COLUMNS * (blocks_of(p->experts) + 1); }

static void put_route(const Pass *p, const Layer *layer, const Input *normed, Member *member) {
    const int64_t blocks = blocks_of(p->experts), row = route_row(p);
    Share units = share(blocks + (p->common && layer->shared_gate.data), member);
    for (int64_t unit = units.first; unit < units.last; unit++)
        columns(unit < blocks ? &layer->router : &layer->shared_gate, unit < blocks ? unit : 0, normed, 0, p->rows,
                p->route + COLUMNS * unit, row, p->narrow);
}

/* Replace a row's router logits by the shares of the chosen experts, by -1 for the others. Of equal ones the first is
   chosen. */
static void choose_experts(const Pass *p, float *route) {
    int64_t chosen[MOST_CHOSEN];
    float inverse = softmax(route, 0, p->experts, 0.0f), sum = 0.0f, shares[MOST_CHOSEN];
    for (int64_t nth = 0; nth < p->chosen; nth++) {
        int64_t best = 0;
        for (int64_t expert = 1; expert < p->experts; expert++)
            if (route[expert] > route[best]) best = expert;
        chosen[nth] = best, shares[nth] = route[best], sum += route[best];
        route[best] = -1.0f;
    }
    if (p->rescaled) inverse = 1.0f / sum;
    for (int64_t expert = 0; expert < p->experts; expert++) route[expert] = -1.0f;
    for (int64_t nth = 0; nth < p->chosen; nth++) route[chosen[nth]] = shares[nth] * inverse;
}

/* Fill `picks`, one expert after another, and `first`, the index at which the picks of each expert begin. */
static void pick(const Pass *p, const Layer *layer) {
    const int64_t row_size = route_row(p), gate = row_size - COLUMNS;
    int64_t count = 0;
    for (int64_t row = 0; row < p->rows; row++) choose_experts(p, p->route + row * row_size);
    for (int64_t expert = 0; expert < p->experts; expert++) {
        p->first[expert] = count;
        for (int64_t row = 0; row < p->rows; row++) {
            const float part = p->route[row * row_size + expert];
            if (part >= 0.0f) p->picks[count++] = (Pick){row, part, 0.0f};
        }
    }
    p->first[p->experts] = count;
    if (!p->common) return;
    for (int64_t row = 0; row < p->rows; row++) {
        const Reals open = load(p->route + row * row_size + gate);
        const float part = layer->shared_gate.data ? (1.0f / (exponential(-open) + 1.0f))[0] : 1.0f;
        p->picks[count++] = (Pick){row, part, 0.0f};
    }
    p->first[p->experts + 1] = count;
}

/* The part of `all` from pick `first` on, `size` numbers for each pick. */
static Input rows_of(const Input *all, int64_t first, int64_t size) {
    return (Input){all->codes ? all->codes + first * size / GROUP : 0, all->floats ? all->floats + first * size : 0};
}

/* The input of the experts: for every pick its row, normed. */
static void gather(const Pass *p, const Layer *layer, int64_t experts, Member *member) {
    Share mine = share(p->first[experts], member);
    for (int64_t expert = 0; expert < experts; expert++) {
        const int64_t first = p->first[expert], last = p->first[expert + 1];
        const Input to = rows_of(&p->routed, first, p->hidden);
        for (int64_t nth = first > mine.first ? first : mine.first; nth < last && nth < mine.last; nth++)
            norm_into(p->x + p->picks[nth].row * p->hidden, layer->between, p->hidden, p->epsilon, &to, nth - first,
                      last - first, p->narrow, 0);
    }
}

/* activation(gate) · up of every expert that has picks; units of 32 columns. */
static void gate_up_experts(const Pass *p, const Layer *layer, int64_t experts, Member *member) {
    int64_t units = 0, before = 0;
    for (int64_t expert = 0; expert < experts; expert++)
        if (p->first[expert] < p->first[expert + 1]) units += layer->experts[expert].gate.rows / GROUP;
    Share mine = share(units, member);
    for (int64_t expert = 0; expert < experts; expert++) {
        const int64_t first = p->first[expert], rows = p->first[expert + 1] - first;
        const Expert *of = &layer->experts[expert];
        if (!rows) continue;
        const Input input = rows_of(&p->routed, first, p->hidden), to = rows_of(&p->gated, first, p->expert_inner);
        const int64_t groups = of->gate.rows / GROUP;
        for (int64_t group = 0; group < groups; group++)
            if (before + group >= mine.first && before + group < mine.last)
                gate_up(p, &of->gate, &of->up, &input, &to, group, rows, member);
        before += groups;
    }
}

/* The experts' results times their shares, added up in `side` and, where no norm follows, added to x; units of 16
   columns. */
static void mix(const Pass *p, const Layer *layer, int64_t experts, Member *member) {
    float *buffer = p->buffer + member->thread * p->buffer_size;
    Share units = share(p->hidden / COLUMNS, member);
    for (int64_t unit = units.first; unit < units.last; unit++) {
        float *side = p->side + COLUMNS * unit, *x = p->x + COLUMNS * unit;
        for (int64_t row = 0; row < p->rows; row++) store(side + row * p->hidden, splat(0.0f));
        for (int64_t expert = 0; expert < experts; expert++) {
            const int64_t first = p->first[expert], rows = p->first[expert + 1] - first;
            const Input input = rows_of(&p->gated, first, p->expert_inner);
            for (int64_t start = 0; start < rows; start += TILE) {
                const int64_t now = rows - start < TILE ? rows - start : TILE;
                columns(&layer->experts[expert].down, unit, &input, start, now, buffer, COLUMNS, p->narrow);
                for (int64_t row = 0; row < now; row++) {
                    const Pick *of = &p->picks[first + start + row];
                    float *to = side + of->row * p->hidden;
                    store(to, load(to) + load(buffer + COLUMNS * row) * of->share);
                }
            }
        }
        for (int64_t row = 0; row < p->rows && !layer->after_mlp; row++)
            store(x + row * p->hidden, load(x + row * p->hidden) + load(side + row * p->hidden) * p->residual_scale);
    }
}

/* The mixture of the normed rows, added to x, or in `side` where a norm follows. */
void mixture(const Pass *p, const Layer *layer, const Input *normed, Member *member) {
    const int64_t experts = p->experts + (p->common != 0);
    put_route(p, layer, normed, member);
    meet(member);
    if (member->thread == 0) pick(p, layer);
    meet(member);
    gather(p, layer, experts, member);
    meet(member);
    gate_up_experts(p, layer, experts, member);
    meet(member);
    mix(p, layer, experts, member);
}
