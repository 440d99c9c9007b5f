// Causal attention in bf16 for processors that multiply bf16 (AVX512-BF16): blocks of scores that
// never leave the cache (Dao et al. 2022, arXiv:2205.14135), all sums in fp32. A key head, with the
// query heads that share it, is one thread's work: every sum has its order. With a window a token
// sees so many tokens, itself among them; blocks of which nobody sees anything are passed over.
//
// Products take the right factor "in pairs": as 32-bit words of two neighbours along the dimension
// that is summed over, a row of words for each pair. So one instruction multiplies two and adds.
#include <memory>

#include "exponential.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define TRAINKIT_BF16 1
#endif

namespace trainkit {
namespace {

constexpr int64_t BLOCK = 64;  // queries, or keys, that are looked at together

#ifdef TRAINKIT_BF16
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")

using Word = uint32_t;  // two bf16

// R rows and V vectors of 16 columns of c (+)= a b.
template <int R, int V>
TRAINKIT_INLINE void tile(const bf16* a, int64_t lda, const Word* b, int64_t ldb, int64_t pairs,
                          float* c, int64_t ldc, bool adds) {
    __m512 sum[R][V];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            sum[r][v] = adds ? _mm512_loadu_ps(c + r * ldc + v * 16) : _mm512_setzero_ps();
        }
    }
    for (int64_t p = 0; p < pairs; ++p) {
        __m512bh right[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            right[v] = (__m512bh)_mm512_loadu_si512(b + p * ldb + v * 16);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            int32_t word;
            std::memcpy(&word, a + r * lda + 2 * p, sizeof(word));
            const __m512bh left = (__m512bh)_mm512_set1_epi32(word);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                sum[r][v] = _mm512_dpbf16_ps(sum[r][v], left, right[v]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            _mm512_storeu_ps(c + r * ldc + v * 16, sum[r][v]);
        }
    }
}

template <int V>
void columns(const bf16* a, int64_t lda, int64_t rows, const Word* b, int64_t ldb, int64_t pairs,
             float* c, int64_t ldc, bool adds) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) {
        tile<4, V>(a + row * lda, lda, b, ldb, pairs, c + row * ldc, ldc, adds);
    }
    for (; row < rows; ++row) {
        tile<1, V>(a + row * lda, lda, b, ldb, pairs, c + row * ldc, ldc, adds);
    }
}

// c (+)= a b for b of `pairs` rows of words; `width` is a multiple of 16.
void multiply(const bf16* a, int64_t lda, int64_t rows, const Word* b, int64_t ldb, int64_t pairs,
              int64_t width, float* c, int64_t ldc, bool adds) {
    int64_t start = 0;
    for (; start + 64 <= width; start += 64) {
        columns<4>(a, lda, rows, b + start, ldb, pairs, c + start, ldc, adds);
    }
    for (; start < width; start += 16) {
        columns<1>(a, lda, rows, b + start, ldb, pairs, c + start, ldc, adds);
    }
}

// A head of queries, keys or values: a row of D numbers for every token.
struct Head {
    const bf16* first;
    int64_t stride;
    const bf16* row(int64_t token) const { return first + token * stride; }
};

// To multiply by the transposed head: words of neighbouring channels, a row for each pair, a
// column for each token, those after the last 0.
void pair_channels(const Head& head, int64_t tokens, int64_t padded, int64_t width, Word* out) {
    constexpr int64_t AT_ONCE = 16;  // rows that stay in the cache
    for (int64_t start = 0; start < padded; start += AT_ONCE) {
        for (int64_t p = 0; p < width / 2; ++p) {
            for (int64_t token = start; token < start + AT_ONCE; ++token) {
                Word word = 0;
                if (token < tokens) {
                    std::memcpy(&word, head.row(token) + 2 * p, sizeof(word));
                }
                out[p * padded + token] = word;
            }
        }
    }
}

// To multiply by the head: words of neighbouring tokens, a row for each pair.
void pair_tokens(const Head& head, int64_t tokens, int64_t padded, int64_t width, Word* out) {
    for (int64_t p = 0; p < padded / 2; ++p) {
        Word* row = out + p * width;
        const int64_t token = 2 * p;
        if (token + 1 < tokens) {
            const bf16* low = head.row(token);
            const bf16* high = head.row(token + 1);
            for (int64_t i = 0; i < width; ++i) {
                row[i] = Word(low[i].bits) | Word(high[i].bits) << 16;
            }
        } else {
            for (int64_t i = 0; i < width; ++i) {
                row[i] = token < tokens ? Word(head.row(token)[i].bits) : 0;
            }
        }
    }
}

// What a thread works in.
struct Forward {
    std::vector<Word> keys;
    std::vector<Word> values;
    std::vector<float> out;
    alignas(64) float scores[BLOCK * BLOCK];
    alignas(64) bf16 weights[BLOCK * BLOCK];
    float highest[BLOCK];
    float sum[BLOCK];
};

// scores[r] of keys [unseen, seen) become weights, relative to the highest so far; what was added
// up before is made relative to that too.
void soften(Forward& f, int64_t r, int64_t unseen, int64_t seen, float scale, int64_t width) {
    float* scores = f.scores + r * BLOCK;
    bf16* weights = f.weights + r * BLOCK;
    float most = f.highest[r];
#pragma omp simd reduction(max : most)
    for (int64_t j = unseen; j < seen; ++j) {
        const float score = scores[j] * scale;
        most = score > most ? score : most;
    }
    const float shift = most == -INFINITY ? 0.0f : most;
    const float shrink = exponential(f.highest[r] - shift);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < BLOCK; ++j) {
        const bool visible = j >= unseen && j < seen;
        const float weight = visible ? exponential(scores[j] * scale - shift) : 0.0f;
        sum += weight;
        weights[j] = narrow<bf16>(weight);
    }
    f.sum[r] = f.sum[r] * shrink + sum;
    f.highest[r] = most;
    float* out = f.out.data() + r * width;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
        out[i] *= shrink;
    }
}

// Scores are multiplied by `scale`; a token sees `window` tokens.
struct Rule {
    float scale;
    int64_t window;
};

// Queries [start, start + rows) of a head, whose keys and values are in pairs.
void attend(Forward& f, const Head& queries, int64_t start, int64_t rows, int64_t padded,
            int64_t width, Rule rule, bf16* y, int64_t y_stride, float* logsum) {
    std::fill_n(f.highest, BLOCK, -INFINITY);
    std::fill_n(f.sum, BLOCK, 0.0f);
    std::fill(f.out.begin(), f.out.end(), 0.0f);
    const int64_t oldest = std::max<int64_t>(0, start - rule.window + 1) / BLOCK * BLOCK;
    for (int64_t key = oldest; key < start + rows; key += BLOCK) {
        multiply(queries.row(start), queries.stride, rows, f.keys.data() + key, padded, width / 2,
                 BLOCK, f.scores, BLOCK, false);
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t seen = start + r + 1 - key;
            soften(f, r, std::max<int64_t>(0, seen - rule.window),
                   std::clamp<int64_t>(seen, 0, BLOCK), rule.scale, width);
        }
        multiply(f.weights, BLOCK, rows, f.values.data() + key / 2 * width, width, BLOCK / 2, width,
                 f.out.data(), width, true);
    }
    for (int64_t r = 0; r < rows; ++r) {
        const float* out = f.out.data() + r * width;
        bf16* row = y + (start + r) * y_stride;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            row[i] = narrow<bf16>(out[i] / f.sum[r]);
        }
        logsum[start + r] = f.highest[r] + std::log(f.sum[r]);
    }
}

struct Backward {
    std::vector<Word> queries_by_channels, gradients_by_channels;
    std::vector<Word> queries_by_tokens, gradients_by_tokens, keys_by_tokens;
    std::vector<float> dq, dk, dv, delta;
    alignas(64) float scores[BLOCK * BLOCK];
    alignas(64) float products[BLOCK * BLOCK];
    alignas(64) bf16 weights[BLOCK * BLOCK];  // keys x queries
    alignas(64) bf16 slopes[BLOCK * BLOCK];   // keys x queries
    alignas(64) bf16 turned[BLOCK * BLOCK];   // queries x keys
};

// One key's row of a block: weights and the gradient of scores from scores and from the products of
// values and gradients. Queries [unseen, end) see the key.
void differentiate(Backward& b, int64_t r, int64_t unseen, int64_t first, int64_t end, float scale,
                   const float* logsum) {
    const float* scores = b.scores + r * BLOCK;
    const float* products = b.products + r * BLOCK;
    bf16* weights = b.weights + r * BLOCK;
    bf16* slopes = b.slopes + r * BLOCK;
    const float* delta = b.delta.data() + first;
#pragma omp simd
    for (int64_t i = 0; i < BLOCK; ++i) {
        const bool seen = i >= unseen && i < end;
        const float weight = seen ? exponential(scores[i] * scale - logsum[first + i]) : 0.0f;
        weights[i] = narrow<bf16>(weight);
        slopes[i] = narrow<bf16>(seen ? weight * (products[i] - delta[i]) * scale : 0.0f);
    }
    for (int64_t i = 0; i < BLOCK; ++i) {
        b.turned[i * BLOCK + r] = slopes[i];
    }
}

void round_rows(const float* from, int64_t rows, int64_t width, bf16* to, int64_t stride) {
    for (int64_t r = 0; r < rows; ++r) {
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            to[r * stride + i] = narrow<bf16>(from[r * width + i]);
        }
    }
}

// Strides of (B, heads, S, D) whose channels lie one after another.
struct Layout {
    int64_t batch;
    int64_t heads;
    int64_t tokens;
    int64_t width;
    int64_t of_batch;
    int64_t of_head;
    int64_t of_token;
    explicit Layout(const Tensor& x)
        : batch(x.size(0)),
          heads(x.size(1)),
          tokens(x.size(2)),
          width(x.size(3)),
          of_batch(x.stride(0)),
          of_head(x.stride(1)),
          of_token(x.stride(2)) {}
    template <class T>
    T* at(T* first, int64_t b, int64_t head) const {
        return first + b * of_batch + head * of_head;
    }
    Head head(const Tensor& x, int64_t b, int64_t number) const {
        return {at(data<bf16>(x), b, number), of_token};
    }
};

void attend_head(Forward& f, const Tensor& q, const Tensor& k, const Tensor& v, Rule rule,
                 const Tensor& y, float* logsum, int64_t b, int64_t group) {
    const Layout of_q(q), of_k(k), of_v(v), of_y(y);
    const int64_t tokens = of_q.tokens, width = of_q.width, shared = of_q.heads / of_k.heads;
    const int64_t padded = (tokens + BLOCK - 1) / BLOCK * BLOCK;
    f.keys.resize(size_t(padded * width / 2));
    f.values.resize(size_t(padded * width / 2));
    f.out.resize(size_t(BLOCK * width));
    pair_channels(of_k.head(k, b, group), tokens, padded, width, f.keys.data());
    pair_tokens(of_v.head(v, b, group), tokens, padded, width, f.values.data());
    for (int64_t head = group * shared; head < (group + 1) * shared; ++head) {
        bf16* out = of_y.at(mutable_data<bf16>(y), b, head);
        for (int64_t start = 0; start < tokens; start += BLOCK) {
            attend(f, of_q.head(q, b, head), start, std::min(BLOCK, tokens - start), padded, width,
                   rule, out, of_y.of_token, logsum + (b * of_q.heads + head) * tokens);
        }
    }
}

// Adds one query head's part to the gradients of its keys and values, and makes its queries'.
void differentiate_head(Backward& s, const Head& q, const Head& k, const Head& v, const Head& dy,
                        const Head& y, int64_t tokens, int64_t padded, int64_t width, Rule rule,
                        const float* logsum) {
    pair_channels(q, tokens, padded, width, s.queries_by_channels.data());
    pair_channels(dy, tokens, padded, width, s.gradients_by_channels.data());
    pair_tokens(q, tokens, padded, width, s.queries_by_tokens.data());
    pair_tokens(dy, tokens, padded, width, s.gradients_by_tokens.data());
    for (int64_t token = 0; token < tokens; ++token) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; ++i) {
            sum += widen(dy.row(token)[i]) * widen(y.row(token)[i]);
        }
        s.delta[size_t(token)] = sum;
    }
    std::fill(s.dq.begin(), s.dq.end(), 0.0f);
    for (int64_t key = 0; key < tokens; key += BLOCK) {
        const int64_t keys = std::min(BLOCK, tokens - key);
        const int64_t last = std::min(tokens, key + keys + rule.window - 1);
        for (int64_t first = key; first < last; first += BLOCK) {
            const int64_t queries = std::min(BLOCK, tokens - first);
            multiply(k.row(key), k.stride, keys, s.queries_by_channels.data() + first, padded,
                     width / 2, BLOCK, s.scores, BLOCK, false);
            multiply(v.row(key), v.stride, keys, s.gradients_by_channels.data() + first, padded,
                     width / 2, BLOCK, s.products, BLOCK, false);
            std::fill_n(s.turned, BLOCK * BLOCK, bf16{0});
            for (int64_t r = 0; r < keys; ++r) {
                const int64_t own = key + r - first;
                differentiate(s, r, own, first, std::min(queries, own + rule.window), rule.scale,
                              logsum);
            }
            multiply(s.weights, BLOCK, keys, s.gradients_by_tokens.data() + first / 2 * width,
                     width, BLOCK / 2, width, s.dv.data() + key * width, width, true);
            multiply(s.slopes, BLOCK, keys, s.queries_by_tokens.data() + first / 2 * width, width,
                     BLOCK / 2, width, s.dk.data() + key * width, width, true);
            multiply(s.turned, BLOCK, queries, s.keys_by_tokens.data() + key / 2 * width, width,
                     BLOCK / 2, width, s.dq.data() + first * width, width, true);
        }
    }
}

struct Gradients {
    Tensor dq;
    Tensor dk;
    Tensor dv;
};

void differentiate_group(Backward& s, const Tensor& dy, const Tensor& q, const Tensor& k,
                         const Tensor& v, const Tensor& y, const float* logsum, Rule rule,
                         const Gradients& to, int64_t b, int64_t group) {
    const Layout of_q(q), of_k(k), of_v(v), of_y(y), of_dy(dy), of_dq(to.dq), of_dk(to.dk);
    const int64_t tokens = of_q.tokens, width = of_q.width, shared = of_q.heads / of_k.heads;
    const int64_t padded = (tokens + BLOCK - 1) / BLOCK * BLOCK;
    const size_t words = size_t(padded * width / 2);
    for (auto* in_pairs : {&s.queries_by_channels, &s.gradients_by_channels, &s.queries_by_tokens,
                           &s.gradients_by_tokens, &s.keys_by_tokens}) {
        in_pairs->resize(words);
    }
    for (auto* sums : {&s.dq, &s.dk, &s.dv}) {
        sums->assign(size_t(padded * width), 0.0f);
    }
    s.delta.assign(size_t(padded), 0.0f);
    const Head keys = of_k.head(k, b, group), values = of_v.head(v, b, group);
    pair_tokens(keys, tokens, padded, width, s.keys_by_tokens.data());
    for (int64_t head = group * shared; head < (group + 1) * shared; ++head) {
        differentiate_head(s, of_q.head(q, b, head), keys, values, of_dy.head(dy, b, head),
                           of_y.head(y, b, head), tokens, padded, width, rule,
                           logsum + (b * of_q.heads + head) * tokens);
        round_rows(s.dq.data(), tokens, width, of_dq.at(mutable_data<bf16>(to.dq), b, head),
                   of_dq.of_token);
    }
    round_rows(s.dk.data(), tokens, width, of_dk.at(mutable_data<bf16>(to.dk), b, group),
               of_dk.of_token);
    round_rows(s.dv.data(), tokens, width, of_dk.at(mutable_data<bf16>(to.dv), b, group),
               of_dk.of_token);
}
#pragma GCC pop_options

bool runs_here() {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#else
bool runs_here() {
    return false;
}
#endif

void check(const Tensor& x, const char* what, const Tensor& q, int64_t heads) {
    STD_TORCH_CHECK(x.dim() == 4 && x.scalar_type() == ScalarType::BFloat16 &&
                        x.size(0) == q.size(0) && x.size(1) == heads && x.size(2) == q.size(2) &&
                        x.size(3) == q.size(3) && x.stride(3) == 1 && x.size(3) % 16 == 0,
                    "trainkit::causal_attention: ", what,
                    " must be torch.bfloat16 of (batch, heads, tokens, channels), channels a"
                    " multiple of 16 that lie one after another");
    STD_TORCH_CHECK(runs_here(), "trainkit::causal_attention needs a processor with AVX512-BF16");
}

void check_all(const Tensor& q, const Tensor& k, const Tensor& v) {
    STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && k.size(1) > 0 && q.size(1) % k.size(1) == 0,
                    "trainkit::causal_attention: heads of queries must be a multiple of those of"
                    " keys");
    check(q, "q", q, q.size(1));
    check(k, "k", q, k.size(1));
    check(v, "v", q, k.size(1));
}

// (B, heads, S, D) in memory of (B, S, heads, D).
Tensor by_tokens(const Tensor& x) {
    return torch::stable::transpose(
        torch::stable::new_empty(x, {x.size(0), x.size(2), x.size(1), x.size(3)}), 1, 2);
}

std::tuple<Tensor, Tensor> causal_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                            double scale, int64_t window) {
    check_all(q, k, v);
    const Tensor y = by_tokens(q);
    const Tensor logsum =
        torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)}, ScalarType::Float);
#ifdef TRAINKIT_BF16
    float* sums = mutable_data<float>(logsum);
    const Rule rule{float(scale), window > 0 ? window : q.size(2)};
    const int64_t groups = k.size(1);
    torch::stable::parallel_for(0, q.size(0) * groups, 1, [&](int64_t begin, int64_t end) {
        const auto work = std::make_unique<Forward>();
        for (int64_t i = begin; i < end; ++i) {
            attend_head(*work, q, k, v, rule, y, sums, i / groups, i % groups);
        }
    });
#endif
    return {y, logsum};
}

std::tuple<Tensor, Tensor, Tensor> causal_attention_backward(const Tensor& given, const Tensor& q,
                                                             const Tensor& k, const Tensor& v,
                                                             const Tensor& y, const Tensor& logsum,
                                                             double scale, int64_t window) {
    check_all(q, k, v);
    const Tensor dy = given.stride(3) == 1 ? given : torch::stable::contiguous(given);
    check(dy, "dy", q, q.size(1));
    check(y, "y", q, q.size(1));
    const Gradients to{by_tokens(q), by_tokens(k), by_tokens(v)};
#ifdef TRAINKIT_BF16
    const Tensor packed_sums = packed(logsum);
    const float* sums = data<float>(packed_sums);
    const Rule rule{float(scale), window > 0 ? window : q.size(2)};
    const int64_t groups = k.size(1);
    torch::stable::parallel_for(0, q.size(0) * groups, 1, [&](int64_t begin, int64_t end) {
        const auto work = std::make_unique<Backward>();
        for (int64_t i = begin; i < end; ++i) {
            differentiate_group(*work, dy, q, k, v, y, sums, rule, to, i / groups, i % groups);
        }
    });
#endif
    return {to.dq, to.dk, to.dv};
}

bool causal_attention_runs() {
    return runs_here();
}

STABLE_TORCH_LIBRARY_IMPL(trainkit, CPU, m) {
    m.impl("causal_attention", TORCH_BOX(&causal_attention));
    m.impl("causal_attention_backward", TORCH_BOX(&causal_attention_backward));
}
STABLE_TORCH_LIBRARY_IMPL(trainkit, CompositeExplicitAutograd, m) {
    m.impl("causal_attention_runs", TORCH_BOX(&causal_attention_runs));
}
}  // namespace
}  // namespace trainkit
