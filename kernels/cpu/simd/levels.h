// Runtime dispatch: a family of kernels has one table of functions per instruction set.
//
// A family's source is compiled once per level, with KERNEL_LEVEL naming the level, and defines
// LevelTable<Table, Level::KERNEL_LEVEL>::table.
#pragma once

namespace allreduce {

enum class Level { baseline, avx2, avx512 };
inline constexpr Level kLevels[] = {Level::baseline, Level::avx2, Level::avx512};

template <class Table, Level level>
struct LevelTable {
  static const Table table;
};

// Whether this processor and this build support a level. Every processor with AVX2 has
// F16C and FMA, but a virtual one may hide them.
inline bool is_supported(Level level) {
#if defined(ALLREDUCE_X86_LEVELS)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("fma");
  if (level == Level::avx2) return avx2;
  if (level == Level::avx512)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  return level == Level::baseline;
}

// The table of a level, or null where that is not supported.
template <class Table>
const Table* table_at(Level level) {
  if (!is_supported(level)) return nullptr;
#if defined(ALLREDUCE_X86_LEVELS)
  if (level == Level::avx512) return &LevelTable<Table, Level::avx512>::table;
  if (level == Level::avx2) return &LevelTable<Table, Level::avx2>::table;
#endif
  return &LevelTable<Table, Level::baseline>::table;
}

template <class Table>
const Table* best_table() {
  const Table* best = nullptr;
  for (Level level : kLevels)
    if (const Table* found = table_at<Table>(level)) best = found;
  return best;
}

// The table in use: the best one, unless a test has chosen another.
template <class Table>
const Table*& table_in_use() {
  static const Table* table = best_table<Table>();
  return table;
}

}  // namespace allreduce
