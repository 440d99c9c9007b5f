// Rotary positions (Su et al. 2021, arXiv:2104.09864) of queries and keys straight out of the fused
// projection, and back into its gradient: one pass over all of it, values copied. Queries and keys
// may be normed before they turn, each head by itself: what a head is rounded to between the two
// stays in the cache, so the bits are those of one after the other.
//
// Shapes: B samples, S tokens, A heads, G groups of keys and values, D channels of a head, of which
// R turn: channel i with channel i + R / 2.
#include "rms_row.h"

namespace trainkit {
namespace {

// One side, `packed_row`, holds a token's heads one after another; the other three are tensors.
template <class T>
struct Heads {
    T* part[3];
    int64_t count[3];  // of heads: A, G, G
    int64_t size;      // D
    int64_t turning;   // R
};

template <class T>
struct Tables {
    const Wide<T>* cos;
    const Wide<T>* sin;
    int64_t tokens;  // the tables are of so many, and begin again
    int64_t width;   // of their rows
};

// RMSNorm of heads: weights of queries and of keys, D each. For backward, what was normed.
template <class T>
struct Norms {
    const Wide<T>* weights;
    double eps;
    const T* fused;
};

// y = x turned by the angle whose cosine and sine are given, channel by channel.
template <class T>
TRAINKIT_INLINE void turn_one(const T* x, T* y, const Wide<T>* cos, const Wide<T>* sin,
                              Wide<T> sign, int64_t half) {
    const Wide<T> first = widen(x[0]);
    const Wide<T> second = widen(x[half]);
    const Wide<T> s = sign * sin[0];
    y[0] = narrow<T>(first * cos[0] - second * s);
    y[half] = narrow<T>(second * cos[0] + first * s);
}

// A vector at a time: where part of a head turns there may be no more than one in it.
template <class T>
TRAINKIT_INLINE void turn(const T* x, T* y, const Wide<T>* cos, const Wide<T>* sin, Wide<T> sign,
                          int64_t half) {
    int64_t start = 0;
    for (; start + 8 <= half; start += 8) {
#pragma omp simd simdlen(8)
        for (int64_t i = start; i < start + 8; ++i) {
            turn_one(x + i, y + i, cos + i, sin + i, sign, half);
        }
    }
    for (; start < half; ++start) {
        turn_one(x + start, y + start, cos + start, sin + start, sign, half);
    }
}

// Tokens [begin, end): from the fused row to the three tensors, or back from them into it, where
// what the norms' weights get is added to `dweights`.
template <bool kBack, bool kNorm, class T>
TRAINKIT_CLONES void rotate(T* fused, const Heads<T>& heads, const Tables<T>& tables,
                            const Norms<T>& norms, Wide<T>* dweights, int64_t begin, int64_t end) {
    const int64_t size = heads.size;
    const int64_t turning = heads.turning;
    int64_t row = begin * size * (heads.count[0] + heads.count[1] + heads.count[2]);
    for (int64_t token = begin; token < end; ++token) {
        const Wide<T>* cos = tables.cos + token % tables.tokens * tables.width;
        const Wide<T>* sin = tables.sin + token % tables.tokens * tables.width;
        for (int64_t part = 0; part < 3; ++part) {
            const int64_t width = heads.count[part] * size;
            T* other = heads.part[part] + token * width;
            const T* from = kBack ? other : fused + row;
            T* to = kBack ? fused + row : other;
            if (part == 2 || (turning < size && (kBack || !kNorm))) {
                std::memcpy(to, from, width * sizeof(T));
            }
            for (int64_t at = 0; part < 2 && at < width; at += size) {
                const Wide<T>* weight = norms.weights + part * size;
                const T* turned = from + at;
                if constexpr (kNorm && !kBack) {
                    scale_row(turned, inverse_rms(turned, size, norms.eps), weight, size, to + at);
                    turned = to + at;
                }
                turn(turned, to + at, cos, sin, Wide<T>(kBack ? -1 : 1), turning / 2);
                if constexpr (kNorm && kBack) {
                    const T* x = norms.fused + row + at;
                    const Wide<T> r = inverse_rms(x, size, norms.eps);
                    const Wide<T> shrink =
                        weigh_row(to + at, x, r, weight, size, dweights + part * size);
                    shrink_row(to + at, x, r, weight, shrink, size, to + at);
                }
            }
            row += width;
        }
    }
}

// What queries and keys are normed by: weights (2, D) in the precision of sums; for backward also
// the fused rows that were normed, and where the weights' gradient goes.
struct GivenNorms {
    Tensor weights;
    double eps;
    Tensor fused;
    Tensor dweights;
};

void check_tables(const char* operation, const Tensor& fused, const Tensor& cos, const Tensor& sin,
                  int64_t size) {
    check_alike(cos, sin, operation);
    STD_TORCH_CHECK(cos.scalar_type() == wide_type(fused), "trainkit::", operation,
                    ": the tables are torch.", toString(cos.scalar_type()), ", not torch.",
                    toString(wide_type(fused)));
    const int64_t samples = fused.size(0);
    const int64_t tokens = fused.size(1);
    STD_TORCH_CHECK(cos.dim() == 2 || cos.dim() == 3, "trainkit::", operation,
                    ": tables have 2 or 3 dimensions, not ", cos.dim());
    const int64_t turning = cos.size(cos.dim() - 1);
    STD_TORCH_CHECK(cos.size(cos.dim() - 2) == tokens, "trainkit::", operation,
                    ": the tables are of ", cos.size(cos.dim() - 2),
                    " tokens a sample, the heads of ", tokens);
    STD_TORCH_CHECK(cos.dim() == 2 || cos.size(0) == samples, "trainkit::", operation,
                    ": the tables are of ", cos.size(0), " x ", tokens, " tokens, the heads of ",
                    samples, " x ", tokens);
    STD_TORCH_CHECK(turning <= size && turning % 2 == 0, "trainkit::", operation, ": ", turning,
                    " of ", size, " channels cannot turn");
}

// What both directions compute with: `fused` (B, S, (A + 2 G) D) and its parts.
template <bool kBack, bool kNorm>
void run(const char* operation, const Tensor& fused, const Tensor (&parts)[3],
         const Tensor& given_cos, const Tensor& given_sin, const GivenNorms& given) {
    const Tensor cos = packed(given_cos);
    const Tensor sin = packed(given_sin);
    const int64_t size = parts[0].size(3);
    check_tables(operation, fused, cos, sin, size);
    const int64_t tokens = fused.size(1);
    const int64_t count = fused.size(0) * tokens;
    for_type(fused.scalar_type(), operation, [&](auto element) {
        using T = decltype(element);
        const int64_t turning = cos.size(cos.dim() - 1);
        const Heads<T> heads{
            {mutable_data<T>(parts[0]), mutable_data<T>(parts[1]), mutable_data<T>(parts[2])},
            {parts[0].size(2), parts[1].size(2), parts[2].size(2)},
            size,
            turning};
        const int64_t period = std::max<int64_t>(1, cos.dim() == 2 ? tokens : count);
        const Tables<T> tables{data<Wide<T>>(cos), data<Wide<T>>(sin), period, turning};
        Norms<T> norms{};
        if constexpr (kNorm) {
            norms = {data<Wide<T>>(given.weights), given.eps, data<T>(given.fused)};
        }
        T* rows = mutable_data<T>(fused);
        if constexpr (kBack && kNorm) {
            const int64_t blocks = row_blocks(count);
            const Tensor partial = torch::stable::new_empty(given.weights, {blocks, 2 * size});
            Wide<T>* sums = mutable_data<Wide<T>>(partial);
            for_blocks(blocks, count, [&](int64_t block, int64_t begin, int64_t end) {
                Wide<T>* own = sums + block * 2 * size;
                std::fill_n(own, 2 * size, Wide<T>(0));
                rotate<kBack, kNorm>(rows, heads, tables, norms, own, begin, end);
            });
            sum_blocks(sums, blocks, 2 * size, mutable_data<Wide<T>>(given.dweights));
        } else {
            parallel_rows(count, fused.size(2), [&](int64_t begin, int64_t end) {
                rotate<kBack, kNorm>(rows, heads, tables, norms, nullptr, begin, end);
            });
        }
    });
}

// Weights (2, D) for heads of `size` channels, in the precision of sums.
Tensor norm_weights(const char* operation, const Tensor& weights, const Tensor& fused,
                    int64_t size) {
    STD_TORCH_CHECK(weights.dim() == 2 && weights.size(0) == 2 && weights.size(1) == size,
                    "trainkit::", operation, ": the weights have ", weights.numel(),
                    " elements, not 2 x ", size);
    return widened(weights, fused, operation);
}

std::tuple<Tensor, Tensor, Tensor> forward(const char* operation, const Tensor& given,
                                           const Tensor* weights, const Tensor& cos,
                                           const Tensor& sin, int64_t heads, int64_t groups,
                                           double eps) {
    const Tensor qkv = packed(given);
    STD_TORCH_CHECK(qkv.dim() == 3, "trainkit::", operation, ": qkv has ", qkv.dim(),
                    " dimensions, not 3");
    const int64_t all = heads + 2 * groups;
    STD_TORCH_CHECK(heads > 0 && groups > 0 && qkv.size(2) % all == 0, "trainkit::", operation,
                    ": ", qkv.size(2), " columns are no ", heads, " + 2 * ", groups, " heads");
    const int64_t size = qkv.size(2) / all;
    const int64_t samples = qkv.size(0);
    const int64_t tokens = qkv.size(1);
    const Tensor parts[3] = {
        torch::stable::new_empty(qkv, {samples, tokens, heads, size}),
        torch::stable::new_empty(qkv, {samples, tokens, groups, size}),
        torch::stable::new_empty(qkv, {samples, tokens, groups, size}),
    };
    if (weights) {
        const Tensor wide = norm_weights(operation, *weights, qkv, size);
        run<false, true>(operation, qkv, parts, cos, sin, {wide, eps, qkv, wide});
    } else {
        run<false, false>(operation, qkv, parts, cos, sin, {});
    }
    return {parts[0], parts[1], parts[2]};
}

// A tensor for the gradient of qkv; refuses parts that do not fit together.
Tensor fused_like(const char* operation, const Tensor (&parts)[3]) {
    const auto& [dq, dk, dv] = parts;
    check_alike(dk, dv, operation);
    check_same_type(dq, dk, operation);
    STD_TORCH_CHECK(dq.dim() == 4 && dk.dim() == 4 && dq.size(0) == dk.size(0) &&
                        dq.size(1) == dk.size(1) && dq.size(3) == dk.size(3),
                    "trainkit::", operation,
                    ": gradients of queries and keys must have 4 dimensions and differ in their"
                    " heads alone");
    const int64_t width = (dq.size(2) + 2 * dk.size(2)) * dq.size(3);
    return torch::stable::new_empty(dq, {dq.size(0), dq.size(1), width});
}

std::tuple<Tensor, Tensor, Tensor> rotate_qkv(const Tensor& qkv, const Tensor& cos,
                                              const Tensor& sin, int64_t heads, int64_t groups) {
    return forward("rotate_qkv", qkv, nullptr, cos, sin, heads, groups, 0);
}

Tensor rotate_qkv_backward(const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& cos,
                           const Tensor& sin) {
    const Tensor parts[3] = {packed(dq), packed(dk), packed(dv)};
    const Tensor dqkv = fused_like("rotate_qkv_backward", parts);
    run<true, false>("rotate_qkv_backward", dqkv, parts, cos, sin, {});
    return dqkv;
}

std::tuple<Tensor, Tensor, Tensor> norm_rotate_qkv(const Tensor& qkv, const Tensor& weights,
                                                   const Tensor& cos, const Tensor& sin,
                                                   int64_t heads, int64_t groups, double eps) {
    return forward("norm_rotate_qkv", qkv, &weights, cos, sin, heads, groups, eps);
}

std::tuple<Tensor, Tensor> norm_rotate_qkv_backward(const Tensor& dq, const Tensor& dk,
                                                    const Tensor& dv, const Tensor& given,
                                                    const Tensor& weights, const Tensor& cos,
                                                    const Tensor& sin, double eps) {
    const char* operation = "norm_rotate_qkv_backward";
    const Tensor parts[3] = {packed(dq), packed(dk), packed(dv)};
    const Tensor dqkv = fused_like(operation, parts);
    const Tensor qkv = packed(given);
    check_alike(qkv, dqkv, operation);
    const Tensor wide = norm_weights(operation, weights, qkv, parts[0].size(3));
    const Tensor dweights = torch::stable::empty_like(wide);
    run<true, true>(operation, dqkv, parts, cos, sin, {wide, eps, qkv, dweights});
    return {dqkv, torch::stable::to(dweights, weights.scalar_type())};
}

STABLE_TORCH_LIBRARY_IMPL(trainkit, CPU, m) {
    m.impl("rotate_qkv", TORCH_BOX(&rotate_qkv));
    m.impl("rotate_qkv_backward", TORCH_BOX(&rotate_qkv_backward));
    m.impl("norm_rotate_qkv", TORCH_BOX(&norm_rotate_qkv));
    m.impl("norm_rotate_qkv_backward", TORCH_BOX(&norm_rotate_qkv_backward));
}
}  // namespace
}  // namespace trainkit
