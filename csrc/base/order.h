// Tasks by weight.
#pragma once

#include "base/args.h"

namespace tilewise {

struct Weighted {
  i64 weight, task;
};

// Sorts by falling weight; tasks of one weight stay in their order.
void heaviest_first(Weighted* tasks, i64 count);

}  // namespace tilewise
