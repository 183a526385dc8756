// The instruction sets of this build, and the one that runs.
#pragma once

#include "base/args.h"

namespace tilewise {

// Those that this machine can run, best first; `count` of them.
const Kernels* const* available(int& count);

// The best one, or the one that was chosen last.
const Kernels& active();

// Chooses by name; false (and no change) when it is unknown or this machine cannot run it.
bool choose(const char* name);

}  // namespace tilewise
