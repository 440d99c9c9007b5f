// Connected components with the least node of each as its root: the result does not depend on the
// order of the edges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace trainkit {

// A node's root; the path to it is halved.
inline std::uint32_t root_of(std::uint32_t* parents, std::uint32_t node) {
    while (parents[node] != node) {
        parents[node] = parents[parents[node]];
        node = parents[node];
    }
    return node;
}

// `edges`: `count` pairs of nodes.
inline void unite(std::uint32_t* parents, const std::uint64_t* edges, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        std::uint32_t a = root_of(parents, static_cast<std::uint32_t>(edges[2 * i]));
        std::uint32_t b = root_of(parents, static_cast<std::uint32_t>(edges[2 * i + 1]));
        if (a == b)
            continue;
        if (a > b)
            std::swap(a, b);
        parents[b] = a;
    }
}

// Every node's parent becomes its root.
inline void find_roots(std::uint32_t* parents, std::size_t size) {
    for (std::size_t node = 0; node < size; ++node)
        parents[node] = parents[parents[node]];  // a parent is less than its node
}

}  // namespace trainkit
