// All kernels of the CPU, as one translation unit.

#include "site.cpp"

#include "curvature.h"
#include "gradients.h"
