// What all kernels share: conversions of 16-bit numbers, dispatch by element type and by the
// machine's vectors, loops over rows that give the same bits for any number of threads.
//
// Everything here uses torch's stable ABI (torch/csrc/stable, torch/headeronly) alone, so that one
// library serves every Python and needs neither pybind11 nor ATen's headers.
//
// Rules of a kernel:
// - Loops that shall be vectors stand in functions marked TRAINKIT_CLONES, written over plain
//   pointers; what they call is marked TRAINKIT_INLINE, else it is compiled once, without vectors.
// - Arithmetic is in `Wide<T>`: fp32, or fp64 for fp64. Nothing is compiled with -ffast-math: NaN
//   and inf come out where they went in.
// - A sum over rows is cut into `row_blocks`, whose number depends on the shape alone.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <vector>

#define TRAINKIT_INLINE inline __attribute__((always_inline))
// One library for every machine: the loader takes the version that it can run.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TRAINKIT_CLONES \
    __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TRAINKIT_CLONES
#endif

namespace trainkit {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

template <class To, class From>
TRAINKIT_INLINE To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To out;
    std::memcpy(&out, &value, sizeof(out));
    return out;
}

template <class T>
struct WideOf {
    using type = float;
};
template <>
struct WideOf<double> {
    using type = double;
};
template <class T>
using Wide = typename WideOf<T>::type;

TRAINKIT_INLINE float widen(float x) {
    return x;
}
TRAINKIT_INLINE double widen(double x) {
    return x;
}
TRAINKIT_INLINE float widen(bf16 x) {
    return bits_as<float>(uint32_t(x.bits) << 16);
}
// Without a branch, for vectors: the exponent is moved to fp32's place by a multiplication, which
// is right for subnormal numbers too; inf and NaN, whose exponent is full, get fp32's full one.
TRAINKIT_INLINE float widen(fp16 x) {
    const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
    const uint32_t finite = bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112f);
    const uint32_t special = magnitude | 0x7f800000;
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
    return bits_as<float>((magnitude >= (0x1fu << 23) ? special : finite) | sign);
}

template <class T>
TRAINKIT_INLINE T narrow(Wide<T> x) {
    return x;
}
// To the nearest, ties to even, as torch rounds; any NaN stays one.
template <>
TRAINKIT_INLINE bf16 narrow<bf16>(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {uint16_t(x != x ? 0x7fc0 : rounded)};
}
// A sum with a number of the right size rounds at fp16's last bit; what is too large became inf by
// the first factor. (F. Giesen and M. Dukhan, as in c10/util/Half.h.)
template <>
TRAINKIT_INLINE fp16 narrow<fp16>(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t exponent = std::max(magnitude & 0x7f800000u, 0x38800000u);
    const float scaled = bits_as<float>(magnitude) * 0x1p112f * 0x1p-110f;
    const uint32_t sum = bits_as<uint32_t>(bits_as<float>(exponent + 0x07800000u) + scaled);
    const uint32_t rounded = ((sum >> 13) & 0x7c00) + (sum & 0x0fff);
    return {uint16_t((magnitude > 0x7f800000u ? 0x7e00 : rounded) | ((bits >> 16) & 0x8000))};
}

// Calls body(T{}) with the element type of a tensor; refuses others in words.
template <class Body>
void for_type(ScalarType type, const char* operation, const Body& body) {
    switch (type) {
        case ScalarType::Float: return body(float{});
        case ScalarType::BFloat16: return body(bf16{});
        case ScalarType::Half: return body(fp16{});
        case ScalarType::Double: return body(double{});
        default:
            STD_TORCH_CHECK(false, "trainkit::", operation,
                            " takes fp32, bf16, fp16 and fp64, not torch.", toString(type));
    }
}

template <class T>
const T* data(const Tensor& tensor) {
    return static_cast<const T*>(tensor.const_data_ptr());
}
template <class T>
T* mutable_data(const Tensor& tensor) {
    return static_cast<T*>(tensor.mutable_data_ptr());
}

// The tensor itself where its elements lie one after another, else a copy in which they do.
inline Tensor packed(const Tensor& tensor) {
    return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// A tensor seen as rows of its last dimension.
struct Rows {
    int64_t count;
    int64_t width;
    explicit Rows(const Tensor& tensor)
        : count(1), width(tensor.dim() ? tensor.size(tensor.dim() - 1) : 1) {
        for (int64_t i = 0; i + 1 < tensor.dim(); ++i) {
            count *= tensor.size(i);
        }
    }
};

// In which precision sums over a tensor are kept.
inline ScalarType wide_type(const Tensor& tensor) {
    return tensor.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// A weight of a row in that precision: it is small, and loops need not know in which it came.
inline Tensor widened(const Tensor& weight, const Tensor& like, const char* operation) {
    STD_TORCH_CHECK(
        weight.scalar_type() == like.scalar_type() || weight.scalar_type() == ScalarType::Float,
        "trainkit::", operation, ": the weight is torch.", toString(weight.scalar_type()),
        " and the input torch.", toString(like.scalar_type()), "; it must be the same, or fp32");
    return packed(torch::stable::to(weight, wide_type(like)));
}

inline void check_weight(const Tensor& weight, int64_t width, const char* operation) {
    STD_TORCH_CHECK(weight.dim() == 1 && weight.size(0) == width, "trainkit::", operation,
                    ": a row has ", width, " elements and the weight ", weight.numel());
}

inline void check_same_type(const Tensor& first, const Tensor& second, const char* operation) {
    STD_TORCH_CHECK(first.scalar_type() == second.scalar_type(), "trainkit::", operation,
                    ": one input is torch.", toString(first.scalar_type()), ", another torch.",
                    toString(second.scalar_type()), "; they must be the same");
}

inline void check_same_shape(const Tensor& first, const Tensor& second, const char* operation) {
    bool same = first.dim() == second.dim();
    for (int64_t i = 0; same && i < first.dim(); ++i) {
        same = first.size(i) == second.size(i);
    }
    STD_TORCH_CHECK(same, "trainkit::", operation, ": two inputs of ", first.numel(), " and ",
                    second.numel(), " elements must have the same shape");
}

// Refuses statistics that are not one number a row in the precision of sums over `x`.
inline void check_statistics(const Tensor& numbers, const Tensor& x, int64_t rows,
                             const char* operation) {
    STD_TORCH_CHECK(
        numbers.scalar_type() == wide_type(x) && numbers.numel() == rows && numbers.is_contiguous(),
        "trainkit::", operation, " takes statistics of ", rows, " rows, contiguous, of torch.",
        toString(wide_type(x)));
}

// Refuses two tensors that are to be read side by side and are of different shapes or types.
inline void check_alike(const Tensor& first, const Tensor& second, const char* operation) {
    check_same_type(first, second, operation);
    check_same_shape(first, second, operation);
}

constexpr int64_t GRAIN = 32768;  // elements for which another thread is worth it, as in ATen

// body(begin, end) for parts of `count` rows of `width` elements, in parallel. Nothing that a row
// gives may depend on where the parts end.
template <class Body>
void parallel_rows(int64_t count, int64_t width, const Body& body) {
    if (count > 0) {
        const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, width));
        torch::stable::parallel_for(0, count, grain, body);
    }
}

// Into how many blocks of rows a sum over rows is cut: so few that what the blocks leave, a row
// of `Wide` each, is little beside what they read; by the shape alone, so that the sum has the
// same bits for any number of threads.
inline int64_t row_blocks(int64_t rows) {
    return std::clamp<int64_t>(rows / 32, 1, 128);
}

// The first row of a block; that of block number `blocks` is `rows`.
inline int64_t block_start(int64_t block, int64_t blocks, int64_t rows) {
    return block * rows / blocks;
}

// body(block, first row, end) for every block of rows, in parallel.
template <class Body>
void for_blocks(int64_t blocks, int64_t rows, const Body& body) {
    torch::stable::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
        for (int64_t block = first; block < last; ++block) {
            body(block, block_start(block, blocks, rows), block_start(block + 1, blocks, rows));
        }
    });
}

template <class A>
TRAINKIT_CLONES void sum_block_columns(const A* partial, int64_t blocks, int64_t width, A* out,
                                       int64_t begin, int64_t end) {
    for (int64_t start = begin; start < end; start += 256) {
        const int64_t stop = std::min(end, start + 256);
        A total[256] = {};
        for (int64_t block = 0; block < blocks; ++block) {
            const A* row = partial + block * width;
#pragma omp simd
            for (int64_t i = start; i < stop; ++i) {
                total[i - start] += row[i];
            }
        }
#pragma omp simd
        for (int64_t i = start; i < stop; ++i) {
            out[i] = total[i - start];
        }
    }
}

// out[i] = the sum over blocks of partial[block][i], always in the order of blocks.
template <class A>
void sum_blocks(const A* partial, int64_t blocks, int64_t width, A* out) {
    torch::stable::parallel_for(0, width, GRAIN / blocks + 1, [&](int64_t begin, int64_t end) {
        sum_block_columns(partial, blocks, width, out, begin, end);
    });
}
}  // namespace trainkit
