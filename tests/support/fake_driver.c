/* The functions of a GPU's driver that this program calls, on memory of the processor: what a test's variables say goes
   wrong does, and kernels that are launched do nothing. Only `INCOMPLETE` leaves functions out. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef int Result;
typedef unsigned long long Address;

static long long said(const char *name, long long otherwise) {
  const char *text = getenv(name);
  return text ? atoll(text) : otherwise;
}

Result cuInit(unsigned flags) { return (Result)said("FAKE_START", 0); }

#ifndef INCOMPLETE
static long long taken;

Result cuDriverGetVersion(int *version) { return *version = (int)said("FAKE_VERSION", 12080), 0; }
Result cuGetErrorName(Result code, const char **text) { return *text = "FAKE", 0; }
Result cuGetErrorString(Result code, const char **text) { return *text = "fake", 0; }
Result cuDeviceGetCount(int *count) { return *count = (int)said("FAKE_CARDS", 1), 0; }
Result cuDeviceGet(int *card, int index) { return *card = index, 0; }
Result cuDeviceGetName(char *name, int length, int card) {
  strncpy(name, "Fake Card", (size_t)length);
  return 0;
}
Result cuDeviceGetAttribute(int *value, int attribute, int card) {
  const int capability = (int)said("FAKE_CAPABILITY", 89);
  switch (attribute) {
    case 16: *value = 4; break;                /* multiprocessors */
    case 75: *value = capability / 10; break;
    case 76: *value = capability % 10; break;
    case 97: *value = 99 << 10; break;         /* shared memory of a block */
    case 102: *value = (int)said("FAKE_MAPPING", 1); break;
    default: *value = 0;
  }
  return 0;
}
Result cuDevicePrimaryCtxRetain(void **context, int card) { return *context = (void *)1, 0; }
Result cuDevicePrimaryCtxRelease_v2(int card) { return 0; }
Result cuCtxGetCurrent(void **context) { return *context = (void *)1, 0; }
Result cuCtxSetCurrent(void *context) { return 0; }
Result cuCtxSynchronize(void) { return 0; }
Result cuMemGetInfo_v2(size_t *left, size_t *all) {
  *all = (size_t)said("FAKE_MEMORY", 1ll << 34);
  *left = *all - (size_t)(taken * said("FAKE_WASTE", 1));
  return 0;
}
static Result take(void **memory, size_t bytes) {
  /* The size lies before. */
  size_t *block = malloc(bytes + 64);
  if (!block || taken + (long long)bytes > said("FAKE_MEMORY", 1ll << 34)) return free(block), 2;
  taken += (long long)bytes;
  *block = bytes;
  *memory = (char *)block + 64;
  return 0;
}
Result cuMemAlloc_v2(Address *address, size_t bytes) {
  void *memory;
  const Result code = take(&memory, bytes);
  return *address = code ? 0 : (Address)(size_t)memory, code;
}
Result cuMemFree_v2(Address address) {
  size_t *block = (size_t *)((size_t)address - 64);
  taken -= (long long)*block;
  return free(block), 0;
}
/* Pages of 2 MiB, which are memory from the start. */
Result cuMemGetAllocationGranularity(size_t *page, const void *properties, int option) { return *page = 2 << 20, 0; }
Result cuMemAddressReserve(Address *address, size_t bytes, size_t alignment, Address hint, unsigned long long flags) {
  void *memory = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *address = (Address)(size_t)memory, memory == MAP_FAILED ? 2 : 0;
}
Result cuMemAddressFree(Address address, size_t bytes) { return munmap((void *)(size_t)address, bytes ? bytes : 1), 0; }
Result cuMemCreate(unsigned long long *handle, size_t bytes, const void *properties, unsigned long long flags) {
  if (taken + (long long)bytes > said("FAKE_MEMORY", 1ll << 34)) return 2;
  taken += (long long)bytes;
  return *handle = bytes, 0;
}
Result cuMemRelease(unsigned long long handle) { return taken -= (long long)handle, 0; }
Result cuMemMap(Address address, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags) {
  return (Result)said("FAKE_MAPS", 0);
}
Result cuMemUnmap(Address address, size_t bytes) { return 0; }
Result cuMemSetAccess(Address address, size_t bytes, const void *access, size_t count) { return 0; }
Result cuMemAllocAsync(Address *address, size_t bytes, void *stream) { return cuMemAlloc_v2(address, bytes); }
Result cuMemFreeAsync(Address address, void *stream) { return cuMemFree_v2(address); }
Result cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) {
  if (said("FAKE_LOCKED", 1ll << 34) < (long long)bytes) return 2;
  return (*memory = malloc(bytes + 1)) ? 0 : 2;
}
Result cuMemHostGetDevicePointer_v2(Address *address, void *memory, unsigned flags) {
  return *address = (Address)(size_t)memory, 0;
}
Result cuMemFreeHost(void *memory) { return free(memory), 0; }
Result cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, void *stream) {
  return memcpy((void *)(size_t)to, from, bytes), 0;
}
Result cuMemcpyDtoHAsync_v2(void *to, Address from, size_t bytes, void *stream) {
  return memcpy(to, (void *)(size_t)from, bytes), 0;
}
Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void *stream) {
  return memcpy((void *)(size_t)to, (void *)(size_t)from, bytes), 0;
}
Result cuMemsetD8Async(Address to, unsigned char value, size_t bytes, void *stream) {
  return memset((void *)(size_t)to, value, bytes), 0;
}
Result cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *options, void *values) {
  return *module = (void *)1, (Result)said("FAKE_MODULES", 0);
}
Result cuModuleUnload(void *module) { return 0; }
Result cuModuleGetFunction(void **function, void *module, const char *name) { return *function = (void *)1, 0; }
Result cuFuncLoad(void *function) { return 0; }
Result cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
Result cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned of_y, unsigned of_z,
                      unsigned shared, void *stream, void **arguments, void **more) {
  return (Result)said("FAKE_LAUNCHES", 0);
}
Result cuStreamCreate(void **stream, unsigned flags) { return *stream = (void *)1, 0; }
Result cuStreamDestroy_v2(void *stream) { return 0; }
Result cuStreamSynchronize(void *stream) { return 0; }
Result cuStreamQuery(void *stream) { return 0; }
Result cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return 0; }
Result cuEventCreate(void **event, unsigned flags) { return *event = (void *)1, 0; }
Result cuEventRecord(void *event, void *stream) { return 0; }
Result cuEventSynchronize(void *event) { return 0; }
Result cuEventDestroy_v2(void *event) { return 0; }
Result cuEventElapsedTime(float *milliseconds, void *from, void *to) { return *milliseconds = 1, 0; }
Result cuStreamBeginCapture_v2(void *stream, int mode) { return 801; /* not supported */ }
Result cuStreamEndCapture(void *stream, void **graph) { return 801; }
Result cuGraphInstantiateWithFlags(void **graph, void *from, unsigned long long flags) { return 801; }
Result cuGraphLaunch(void *graph, void *stream) { return 801; }
Result cuGraphDestroy(void *graph) { return 0; }
Result cuGraphExecDestroy(void *graph) { return 0; }
#endif
