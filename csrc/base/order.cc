#include "base/order.h"

#include <algorithm>

namespace tilewise {

void heaviest_first(Weighted* tasks, i64 count) {
  std::sort(tasks, tasks + count, [](const Weighted& a, const Weighted& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.task < b.task;
  });
}

}  // namespace tilewise
