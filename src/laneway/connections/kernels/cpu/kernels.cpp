// All kernels of the CPU, as one translation unit.

#include "site.cpp"

#include "gradients.h"
