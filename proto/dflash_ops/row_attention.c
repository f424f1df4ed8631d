/* Attention of packed rows over their pages and over their own tokens, in float32, on one CPU thread.
 *
 * compiled_attention.py calls it; kernel_build.py compiles it, with DIM as the size of a head: a multiple of 16.
 * A query takes its keys in the order of their positions, a tile at a time from position 0 on, with an online
 * softmax; a tile's sums are always formed in the same order. So a query's bits depend on its own keys alone: not on
 * how wide its row is, on whether it belongs to a prompt, a chain or a tree, or on who shares the pass.
 *
 * Terms:
 *   piece  one key/value head of one row; pieces are attended one after another
 *   lane   element of a vector; vectors are as long as the processor's
 *   tile   as many keys of a piece, with their values, as there are lanes; fewer at the end
 *   seat   index of a query in state_t, among those of a piece that go through its keys together, up to SEATS
 *   block  up to 4 queries in seats that follow each other, for which a tile is loaded once
 *   path   of a tree's token: the row's own tokens from the root to it, itself included
 *   seen   of a query: how many keys of a tile it attends to; they are always the first ones
 */
#include <math.h>
#include <stdint.h>

#if defined(LANES) /* as tests ask for */
#elif defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define TILE LANES
#define BLOCK 4
#define SEATS 64
#define VECTORS (DIM / LANES) /* of a head */
#define TOGETHER (VECTORS % 3 == 0 ? 3 : VECTORS % 2 == 0 ? 2 : 1) /* vectors that are summed at a time */
#define INLINE static inline __attribute__((always_inline))
#define MIX(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)

/* f(i, n) for every lane i. */
#define FOUR(f, n, i) f(i, n), f(i + 1, n), f(i + 2, n), f(i + 3, n)
#if LANES == 16
#define EACH_LANE(f, n) FOUR(f, n, 0), FOUR(f, n, 4), FOUR(f, n, 8), FOUR(f, n, 12)
#elif LANES == 8
#define EACH_LANE(f, n) FOUR(f, n, 0), FOUR(f, n, 4)
#else
#define EACH_LANE(f, n) FOUR(f, n, 0)
#endif
#define ITSELF(i, n) (i)
#define ACROSS(i, n) (((i) ^ (n)) % LANES)
#define IN_TURN(i, half) ((half) * LANES / 2 + (i) / 2 + (i) % 2 * LANES)

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float loose_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

enum { CAUSAL = 0, ALL = 1, TREE = 2 };

typedef struct {
    int64_t offset;     /* its first token's place in the pass */
    int64_t width;      /* tokens of its own */
    int64_t context;    /* committed positions before them */
    int64_t first_page; /* where its pages begin in `pages` */
    int64_t visible;    /* CAUSAL, ALL or TREE */
    int64_t first_path; /* of a TREE: where its tokens' paths begin in `path_ends` */
} row_t;

typedef struct {
    const row_t *rows;
    const int64_t *pages;     /* page ids, row after row */
    const int64_t *path_ends; /* where in `paths` each tree token's path ends; the one before is its beginning */
    const int64_t *paths;     /* own tokens along the paths of tree tokens, path after path */
    const float *pool;        /* [L, 2, G, slots, D] */
    int64_t num_rows, heads_per_kv, num_kv_heads, page_size, num_slots;
} pass_t;

/* A piece: what its queries have in common. */
typedef struct {
    const pass_t *pass;
    const row_t *row;
    const float *keys, *values; /* [slots, D] */
    const float *own;           /* the head's key of the pass's first token */
    int64_t kv_head;
} piece_t;

typedef struct {
    const float *key[TILE];
    const float *value[TILE];
    int count; /* of those that are there */
} tile_t;

/* Queries of one piece on their way through its keys. */
typedef struct {
    vec sum[SEATS][VECTORS]; /* of values, weighted */
    float query[SEATS][DIM] __attribute__((aligned(64))); /* scaled */
    float largest[SEATS];                                 /* score so far */
    float total[SEATS];                                   /* of weights */
} state_t;

INLINE vec load(const float *from) { return *(const loose_vec *)from; }

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec choose(ivec condition, vec yes, vec no) {
    return (vec)(((ivec)yes & condition) | ((ivec)no & ~condition));
}

INLINE vec maximum_of(vec x, vec y) { return choose(x > y, x, y); }

INLINE int clipped(int64_t count) { return count < 0 ? 0 : count > TILE ? TILE : (int)count; }

/* exp(x) for x <= 0 to 2e-7 of itself; 0 below -87. */
INLINE vec exp_of(vec x) {
    const vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* x / ln 2, rounded */
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;   /* x - n ln 2 */
    vec y = splat(1.9875691e-4f);
    y = y * r + 1.3981999e-3f;
    y = y * r + 8.3334519e-3f;
    y = y * r + 4.1665796e-2f;
    y = y * r + 1.6666665e-1f;
    y = y * r + 5.0000001e-1f;
    y = y * (r * r) + r + 1.0f;
    const ivec power = (__builtin_convertvector(n, ivec) + 127) << 23; /* 2^n */
    return choose(x < -87.0f, splat(0.0f), y * (vec)power);
}

/* Halves, quarters and so on of a vector in each other's places. */
#define SWAP(x, n) MIX(x, x, EACH_LANE(ACROSS, n))

INLINE float largest_in(vec x) {
    if (LANES > 8) x = maximum_of(x, SWAP(x, 8));
    if (LANES > 4) x = maximum_of(x, SWAP(x, 4));
    x = maximum_of(x, SWAP(x, 2));
    return maximum_of(x, SWAP(x, 1))[0];
}

INLINE float total_in(vec x) {
    if (LANES > 8) x += SWAP(x, 8);
    if (LANES > 4) x += SWAP(x, 4);
    x += SWAP(x, 2);
    return (x + SWAP(x, 1))[0];
}

/* Of two vectors, the first halves and then the last ones, element by element in turn. */
INLINE void zip(const vec *from, vec *to) {
    for (int i = 0; i < LANES / 2; i++) {
        to[2 * i] = MIX(from[i], from[i + LANES / 2], EACH_LANE(IN_TURN, 0));
        to[2 * i + 1] = MIX(from[i], from[i + LANES / 2], EACH_LANE(IN_TURN, 1));
    }
}

/* Transposes as many dimensions of a tile's keys as there are lanes, from `at` on: log2(LANES) rounds of zipping. */
INLINE void transpose(const tile_t *tile, int at, vec *to) {
    vec a[TILE], b[TILE];
    for (int k = 0; k < TILE; k++) a[k] = k < tile->count ? load(tile->key[k] + at) : splat(0.0f);
    zip(a, b);
    if (LANES > 4) zip(b, a);
    if (LANES > 8) zip(a, b);
    zip(LANES == 8 ? a : b, to);
}

/* Adds a tile's weighted values to the sums of n queries from `seat` on. */
INLINE void add_values(state_t *s, int seat, int n, const tile_t *tile, const float weight[BLOCK][TILE]) {
    for (int c = 0; c < VECTORS; c += TOGETHER) {
        vec sum[BLOCK][TOGETHER];
        for (int i = 0; i < n; i++)
            for (int j = 0; j < TOGETHER; j++) sum[i][j] = s->sum[seat + i][c + j];
        for (int k = 0; k < tile->count; k++)
            for (int j = 0; j < TOGETHER; j++) {
                const vec value = load(tile->value[k] + (c + j) * LANES);
                for (int i = 0; i < n; i++) sum[i][j] += weight[i][k] * value;
            }
        for (int i = 0; i < n; i++)
            for (int j = 0; j < TOGETHER; j++) s->sum[seat + i][c + j] = sum[i][j];
    }
}

/* One tile for n queries from `seat` on; transposed[d] holds dimension d of its keys, and each query sees the first
 * seen[seat] of them. */
INLINE void attend_block(state_t *s, int seat, int n, const vec *transposed, const tile_t *tile, const int *seen) {
    const ivec lane = {EACH_LANE(ITSELF, 0)};
    vec even[BLOCK], odd[BLOCK]; /* dimensions apart: shorter chains of additions */
    float weight[BLOCK][TILE] __attribute__((aligned(64)));
    for (int i = 0; i < n; i++) even[i] = odd[i] = splat(0.0f);
    for (int d = 0; d < DIM; d += 2)
        for (int i = 0; i < n; i++) {
            even[i] += s->query[seat + i][d] * transposed[d];
            odd[i] += s->query[seat + i][d + 1] * transposed[d + 1];
        }
    for (int i = 0; i < n; i++) {
        const int q = seat + i;
        const vec score = choose(lane < seen[q], even[i] + odd[i], splat(-INFINITY));
        const float here = largest_in(score);
        if (here > s->largest[q]) {
            const float shrunk = exp_of(splat(s->largest[q] - here))[0];
            s->largest[q] = here;
            s->total[q] *= shrunk;
            for (int c = 0; c < VECTORS; c++) s->sum[q][c] *= shrunk;
        }
        const vec weights = exp_of(score - s->largest[q]);
        s->total[q] += total_in(weights);
        *(vec *)weight[i] = weights;
    }
    add_values(s, seat, n, tile, weight);
}

static void attend_tile(state_t *s, int seat, int num_queries, const tile_t *tile, const int *seen) {
    const int end = seat + num_queries;
    vec transposed[DIM];
    for (int c = 0; c < VECTORS; c++) transpose(tile, c * LANES, transposed + c * LANES);
    for (; seat + 4 <= end; seat += 4) attend_block(s, seat, 4, transposed, tile, seen);
    if (seat + 2 <= end) {
        attend_block(s, seat, 2, transposed, tile, seen);
        seat += 2;
    }
    if (seat < end) attend_block(s, seat, 1, transposed, tile, seen);
}

/* Finds `count` keys from position `start` on: committed ones, then the row's own, along a path if there is one. */
INLINE void gather(const piece_t *piece, const int64_t *path, int64_t start, int count, tile_t *tile) {
    const pass_t *p = piece->pass;
    const row_t *row = piece->row;
    const int64_t *pages = p->pages + row->first_page, half = p->num_kv_heads * DIM;
    const int num_committed = clipped(row->context - start) < count ? clipped(row->context - start) : count;
    int64_t page = start / p->page_size, within = start % p->page_size;
    tile->count = count;
    for (int k = 0; k < num_committed; k++) {
        const int64_t at = (pages[page] * p->page_size + within) * DIM;
        tile->key[k] = piece->keys + at;
        tile->value[k] = piece->values + at;
        if (++within == p->page_size) page++, within = 0;
    }
    for (int k = num_committed; k < count; k++) {
        const int64_t index = start + k - row->context;
        tile->key[k] = piece->own + (row->offset + (path ? path[index] : index)) * 2 * half;
        tile->value[k] = tile->key[k] + half;
    }
}

/* Asks for a tile of the context that is soon needed: pages lie too far apart for processors to guess them. */
INLINE void prefetch(const piece_t *piece, int64_t start) {
    tile_t tile;
    if (start + TILE > piece->row->context) return;
    gather(piece, 0, start, TILE, &tile);
    for (int k = 0; k < TILE; k++)
        for (int c = 0; c < VECTORS; c++) {
            __builtin_prefetch(tile.key[k] + c * LANES);
            __builtin_prefetch(tile.value[k] + c * LANES);
        }
}

INLINE void begin(state_t *s, int seat, const float *query, float scale) {
    for (int d = 0; d < DIM; d++) s->query[seat][d] = query[d] * scale;
    for (int c = 0; c < VECTORS; c++) s->sum[seat][c] = splat(0.0f);
    s->largest[seat] = -INFINITY;
    s->total[seat] = 0.0f;
}

INLINE void finish(const state_t *s, int seat, float *out) {
    for (int c = 0; c < VECTORS; c++) *(loose_vec *)(out + c * LANES) = s->sum[seat][c] / s->total[seat];
}

/* The keys behind the last whole tile of the context, of one token of a tree: they lie along its path. */
INLINE void attend_path(const piece_t *piece, state_t *s, int seat, int64_t token, int64_t start) {
    const pass_t *p = piece->pass;
    const int64_t *ends = p->path_ends + piece->row->first_path + token;
    const int64_t end = piece->row->context + ends[1] - ends[0];
    int seen[SEATS];
    tile_t tile;
    for (; start < end; start += TILE) {
        for (int h = 0; h < p->heads_per_kv; h++) seen[seat + h] = clipped(end - start);
        gather(piece, p->paths + ends[0], start, clipped(end - start), &tile);
        attend_tile(s, seat, (int)p->heads_per_kv, &tile, seen);
    }
}

/* The queries of `num_tokens` tokens from `token` on, which are seated head by head. */
INLINE void attend_tokens(const piece_t *piece, const float *query, int64_t per_token, float *out, int64_t token,
                          int num_tokens, float scale, state_t *s) {
    const pass_t *p = piece->pass;
    const row_t *row = piece->row;
    const int heads = (int)p->heads_per_kv, num_queries = num_tokens * heads;
    const int64_t first_head = piece->kv_head * heads, per_out = p->num_kv_heads * heads * DIM;
    int64_t ends[SEATS], most = 0; /* keys that each query sees here, and the most of them */
    int seen[SEATS];
    tile_t tile;
    for (int q = 0; q < num_queries; q++) {
        const int64_t at = token + q / heads;
        begin(s, q, query + (row->offset + at) * per_token + (first_head + q % heads) * DIM, scale);
        ends[q] = row->context + (row->visible == ALL ? row->width : at + 1);
        if (row->visible == TREE) ends[q] = row->context / TILE * TILE;
        most = ends[q] > most ? ends[q] : most;
    }
    for (int64_t start = 0; start < most; start += TILE) {
        for (int q = 0; q < num_queries; q++) seen[q] = clipped(ends[q] - start);
        gather(piece, 0, start, clipped(most - start), &tile);
        prefetch(piece, start + TILE);
        attend_tile(s, 0, num_queries, &tile, seen);
    }
    for (int t = 0; row->visible == TREE && t < num_tokens; t++) attend_path(piece, s, t * heads, token + t, most);
    for (int q = 0; q < num_queries; q++)
        finish(s, q, out + (row->offset + token + q / heads) * per_out + (first_head + q % heads) * DIM);
}

INLINE piece_t piece_at(const pass_t *p, int64_t n, int64_t layer, const float *own) {
    const int64_t per_head = p->num_slots * DIM, kv_head = n % p->num_kv_heads;
    const float *keys = p->pool + (2 * layer * p->num_kv_heads + kv_head) * per_head;
    const float *values = keys + p->num_kv_heads * per_head;
    return (piece_t){p, p->rows + n / p->num_kv_heads, keys, values, own + kv_head * DIM, kv_head};
}

/* At most SEATS query heads share a key/value head. `query` [T, H, D], whose tokens lie `per_token` floats apart,
 * `own` [T, 2, G, D] and `out` [T, H, D]. */
void attend(const pass_t *p, int64_t layer, const float *query, int64_t per_token, const float *own, float *out,
            float scale) {
    static __thread state_t state;
    const int64_t num_pieces = p->num_rows * p->num_kv_heads;
    const int at_once = SEATS / (int)p->heads_per_kv;
    for (int64_t n = 0; n < num_pieces; n++) {
        const piece_t piece = piece_at(p, n, layer, own);
        const int64_t width = piece.row->width;
        if (n + 1 < num_pieces) {
            const piece_t next = piece_at(p, n + 1, layer, own);
            prefetch(&next, 0);
        }
        for (int64_t token = 0; token < width; token += at_once) {
            const int num_tokens = width - token < at_once ? (int)(width - token) : at_once;
            attend_tokens(&piece, query, per_token, out, token, num_tokens, scale, &state);
        }
    }
}
