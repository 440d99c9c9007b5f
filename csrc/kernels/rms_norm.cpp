// RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), alone and after a residual sum, forward and
// backward. A row comes from memory once and is in the cache when it is looked at again.
#include "rms_row.h"

namespace trainkit {
namespace {

// What goes through forward; `residual` is added to x, and `sum` is where that goes.
template <class T>
struct Forward {
    const T* x;
    const T* residual;
    const Wide<T>* weight;
    T* y;
    T* sum;
    Wide<T>* rstd;
    int64_t width;
    double eps;
};

template <bool kAdd, class T>
TRAINKIT_CLONES void forward(const Forward<T>& a, int64_t begin, int64_t end) {
    using A = Wide<T>;
    const int64_t width = a.width;
    const Wide<T>* weight = a.weight;
    for (int64_t row = begin; row < end; ++row) {
        const T* x = a.x + row * width;
        T* y = a.y + row * width;
        A r;
        if constexpr (kAdd) {
            const T* residual = a.residual + row * width;
            T* sum = a.sum + row * width;
            A squares = 0;
#pragma omp simd reduction(+ : squares)
            for (int64_t i = 0; i < width; ++i) {
                sum[i] = narrow<T>(widen(x[i]) + widen(residual[i]));
                const A value = widen(sum[i]);
                squares += value * value;
            }
            x = sum;
            r = A(1) / std::sqrt(squares / A(width) + A(a.eps));
        } else {
            r = inverse_rms(x, width, a.eps);
        }
        a.rstd[row] = r;
        scale_row(x, r, weight, width, y);
    }
}

// What goes through backward; `dsum` is the gradient of the sum itself, which x's takes in.
template <class T>
struct Backward {
    const T* dy;
    const T* dsum;
    const T* x;
    const Wide<T>* weight;
    const Wide<T>* rstd;
    T* dx;
    int64_t width;
};

template <bool kAdd, class T>
TRAINKIT_CLONES void backward(const Backward<T>& a, Wide<T>* dweight, int64_t begin, int64_t end) {
    using A = Wide<T>;
    const int64_t width = a.width;
    const Wide<T>* weight = a.weight;
    std::fill_n(dweight, width, A(0));
    for (int64_t row = begin; row < end; ++row) {
        const T* x = a.x + row * width;
        const T* dy = a.dy + row * width;
        T* dx = a.dx + row * width;
        const A r = a.rstd[row];
        const A shrink = weigh_row(dy, x, r, weight, width, dweight);
        if constexpr (kAdd) {
            const T* dsum = a.dsum + row * width;
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) {
                const A own = widen(dy[i]) * r * weight[i] - widen(x[i]) * shrink;
                dx[i] = narrow<T>(own + widen(dsum[i]));
            }
        } else {
            shrink_row(dy, x, r, weight, shrink, width, dx);
        }
    }
}

template <bool kAdd>
std::tuple<Tensor, Tensor, Tensor> run_forward(const char* operation, const Tensor& given,
                                               const Tensor& other, const Tensor& given_weight,
                                               double eps) {
    const Tensor x = packed(given);
    const Tensor residual = packed(other);
    const Tensor weight = widened(given_weight, x, operation);
    const Rows rows(x);
    check_alike(x, residual, operation);
    check_weight(weight, rows.width, operation);
    const Tensor y = torch::stable::empty_like(x);
    const Tensor sum = kAdd ? torch::stable::empty_like(x) : y;
    const Tensor rstd = torch::stable::new_empty(x, {rows.count}, wide_type(x));
    for_type(x.scalar_type(), operation, [&](auto element) {
        using T = decltype(element);
        const Forward<T> a{data<T>(x),
                           data<T>(residual),
                           data<Wide<T>>(weight),
                           mutable_data<T>(y),
                           mutable_data<T>(sum),
                           mutable_data<Wide<T>>(rstd),
                           rows.width,
                           eps};
        parallel_rows(rows.count, rows.width,
                      [&](int64_t begin, int64_t end) { forward<kAdd>(a, begin, end); });
    });
    return {y, sum, rstd};
}

template <bool kAdd>
std::tuple<Tensor, Tensor> run_backward(const char* operation, const Tensor& given_dy,
                                        const Tensor& given_dsum, const Tensor& given_x,
                                        const Tensor& given_weight, const Tensor& rstd) {
    const Tensor dy = packed(given_dy);
    const Tensor dsum = packed(given_dsum);
    const Tensor x = packed(given_x);
    const Tensor weight = widened(given_weight, x, operation);
    const Rows rows(x);
    check_alike(x, dy, operation);
    check_alike(x, dsum, operation);
    check_weight(weight, rows.width, operation);
    check_statistics(rstd, x, rows.count, operation);
    const Tensor dx = torch::stable::empty_like(x);
    const Tensor dweight = torch::stable::empty_like(weight);
    const int64_t blocks = row_blocks(rows.count);
    const Tensor partial = torch::stable::new_empty(x, {blocks, rows.width}, wide_type(x));
    for_type(x.scalar_type(), operation, [&](auto element) {
        using T = decltype(element);
        using A = Wide<T>;
        const Backward<T> a{data<T>(dy),   data<T>(dsum),       data<T>(x), data<Wide<T>>(weight),
                            data<A>(rstd), mutable_data<T>(dx), rows.width};
        A* sums = mutable_data<A>(partial);
        for_blocks(blocks, rows.count, [&](int64_t block, int64_t begin, int64_t end) {
            backward<kAdd>(a, sums + block * rows.width, begin, end);
        });
        sum_blocks(sums, blocks, rows.width, mutable_data<A>(dweight));
    });
    return {dx, torch::stable::to(dweight, given_weight.scalar_type())};
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps) {
    const auto [y, sum, rstd] = run_forward<false>("rms_norm", x, x, weight, eps);
    return {y, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dy, const Tensor& x,
                                             const Tensor& weight, const Tensor& rstd) {
    return run_backward<false>("rms_norm_backward", dy, dy, x, weight, rstd);
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                                const Tensor& weight, double eps) {
    return run_forward<true>("add_rms_norm", x, residual, weight, eps);
}

std::tuple<Tensor, Tensor> add_rms_norm_backward(const Tensor& dy, const Tensor& dsum,
                                                 const Tensor& sum, const Tensor& weight,
                                                 const Tensor& rstd) {
    return run_backward<true>("add_rms_norm_backward", dy, dsum, sum, weight, rstd);
}

STABLE_TORCH_LIBRARY_IMPL(trainkit, CPU, m) {
    m.impl("rms_norm", TORCH_BOX(&rms_norm));
    m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
    m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
    m.impl("add_rms_norm_backward", TORCH_BOX(&add_rms_norm_backward));
}
}  // namespace
}  // namespace trainkit
