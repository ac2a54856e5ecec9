// What LibTorch links of NCCL besides, and nobody here calls: it must resolve.
#pragma GCC visibility push(default)
extern "C" {
#define NONE(name) \
  int name() {     \
    return 5;      \
  }  // ncclInvalidUsage
NONE(ncclAlltoAll);
NONE(ncclBcast);
NONE(ncclCommDeregister);
NONE(ncclCommInitAll);
NONE(ncclCommInitRankScalable);
NONE(ncclCommRegister);
NONE(ncclCommShrink);
NONE(ncclCommSplit);
NONE(ncclCommWindowDeregister);
NONE(ncclCommWindowRegister);
NONE(ncclDevCommCreate);
NONE(ncclDevCommDestroy);
NONE(ncclGroupSimulateEnd);
NONE(ncclMemAlloc);
NONE(ncclMemFree);
NONE(ncclRedOpCreatePreMulSum);
NONE(ncclRedOpDestroy);
NONE(ncclReduce);
}
#pragma GCC visibility pop
