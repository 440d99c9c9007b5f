// swiglu and geglu: act(gate) * up of rows that hold all gates, then all values (Shazeer 2020,
// arXiv:2002.05202). Backward computes the activation again instead of keeping it.
#include "activations.h"

namespace trainkit {
namespace {

template <class Act, class T>
TRAINKIT_CLONES void forward(const T* gate_up, T* h, int64_t width, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const T* gate = gate_up + row * 2 * width;
        const T* up = gate + width;
        T* out = h + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            const Wide<T> x = widen(gate[i]);
            out[i] = narrow<T>(x * Act::at(x).share * widen(up[i]));
        }
    }
}

template <class Act, class T>
TRAINKIT_CLONES void backward(const T* dh, const T* gate_up, T* dgate_up, int64_t width,
                              int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const T* d = dh + row * width;
        const T* gate = gate_up + row * 2 * width;
        const T* up = gate + width;
        T* dgate = dgate_up + row * 2 * width;
        T* dup = dgate + width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            const Wide<T> x = widen(gate[i]);
            const Curve<Wide<T>> curve = Act::at(x);
            const Wide<T> gradient = widen(d[i]);
            dgate[i] = narrow<T>(gradient * widen(up[i]) * curve.slope);
            dup[i] = narrow<T>(gradient * x * curve.share);
        }
    }
}

// Rows of gate_up, `width` of h.
Rows halves(const Tensor& gate_up, const char* operation) {
    Rows rows(gate_up);
    STD_TORCH_CHECK(gate_up.dim() > 0 && rows.width % 2 == 0, "trainkit::", operation,
                    ": a row has ", rows.width, " elements, which are no two halves");
    rows.width /= 2;
    return rows;
}

template <class Act>
Tensor run_forward(Act, const char* operation, const Tensor& given) {
    const Tensor gate_up = packed(given);
    const Rows rows = halves(gate_up, operation);
    std::vector<int64_t> shape(gate_up.sizes().begin(), gate_up.sizes().end());
    shape.back() = rows.width;
    const Tensor h = torch::stable::new_empty(gate_up, shape);
    for_type(gate_up.scalar_type(), operation, [&](auto element) {
        using T = decltype(element);
        parallel_rows(rows.count, rows.width, [&](int64_t begin, int64_t end) {
            forward<Act>(data<T>(gate_up), mutable_data<T>(h), rows.width, begin, end);
        });
    });
    return h;
}

template <class Act>
Tensor run_backward(Act, const char* operation, const Tensor& given_dh, const Tensor& given) {
    const Tensor dh = packed(given_dh);
    const Tensor gate_up = packed(given);
    const Rows rows = halves(gate_up, operation);
    const Rows of_dh(dh);
    check_same_type(dh, gate_up, operation);
    STD_TORCH_CHECK(of_dh.count == rows.count && of_dh.width == rows.width, "trainkit::", operation,
                    ": the gradient has ", of_dh.count, " rows of ", of_dh.width, ", not ",
                    rows.count, " of ", rows.width);
    const Tensor dgate_up = torch::stable::empty_like(gate_up);
    for_type(gate_up.scalar_type(), operation, [&](auto element) {
        using T = decltype(element);
        parallel_rows(rows.count, rows.width, [&](int64_t begin, int64_t end) {
            backward<Act>(data<T>(dh), data<T>(gate_up), mutable_data<T>(dgate_up), rows.width,
                          begin, end);
        });
    });
    return dgate_up;
}

Tensor swiglu(const Tensor& gate_up) {
    return run_forward(Silu{}, "swiglu", gate_up);
}

Tensor swiglu_backward(const Tensor& dh, const Tensor& gate_up) {
    return run_backward(Silu{}, "swiglu_backward", dh, gate_up);
}

Tensor geglu(const Tensor& gate_up, const std::string& approximate) {
    Tensor h;
    for_gelu(approximate, "geglu", [&](auto act) { h = run_forward(act, "geglu", gate_up); });
    return h;
}

Tensor geglu_backward(const Tensor& dh, const Tensor& gate_up, const std::string& approximate) {
    Tensor dgate_up;
    for_gelu(approximate, "geglu_backward",
             [&](auto act) { dgate_up = run_backward(act, "geglu_backward", dh, gate_up); });
    return dgate_up;
}

STABLE_TORCH_LIBRARY_IMPL(trainkit, CPU, m) {
    m.impl("swiglu", TORCH_BOX(&swiglu));
    m.impl("swiglu_backward", TORCH_BOX(&swiglu_backward));
    m.impl("geglu", TORCH_BOX(&geglu));
    m.impl("geglu_backward", TORCH_BOX(&geglu_backward));
}
}  // namespace
}  // namespace trainkit
