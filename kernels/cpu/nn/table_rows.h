// Rows of a table by their numbers: which are equal, copies of rows to their places, sums of
// gradients.
#pragma once

#include <cstddef>
#include <cstdint>

namespace allreduce {

// Which of n numbers are equal. Those of group g are at order[starts[g]] to order[starts[g + 1] -
// 1], in their order.
struct RowGroups {
  const std::int64_t* starts;
  const std::int64_t* order;
  std::size_t count;
};

// Groups numbers, which are from 0 on; returns how many differ. Bytes moved per number of 4 bytes:
// 48, and 16 for each byte in which numbers differ.
//
// different: the number of each group, rising (n); order: (n); starts: (n + 1).
template <class Number>
std::size_t group_numbers(const Number* numbers, std::size_t n, Number* different,
                          std::int64_t* order, std::int64_t* starts);

// Copies the row of each group, of `width` bytes, to all places of its number.
void spread_rows(const RowGroups& groups, const unsigned char* rows, std::size_t width,
                 unsigned char* out);

// Adds up the rows of each group, in float64: a padding's number has thousands of places.
template <class T>
void add_rows(const RowGroups& groups, const T* rows, std::size_t width, T* sums);

}  // namespace allreduce
