// What a fork leaves behind (base/parallel.cc).
#pragma once

namespace tilewise {

// Whether a fork by this thread leaves it without the threads that it has used: a team of more than one
// would then wait for them forever.
bool fork_loses_team();

}  // namespace tilewise
