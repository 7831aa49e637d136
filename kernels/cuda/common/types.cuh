// Integer types by their sizes, and the lanes of a warp.
#pragma once

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

constexpr uint32 kAllLanes = 0xffffffffu;
