/* NCCL's API for one rank, which does nothing but keep a record: what a simulated accelerator has
 * in place of libnccl where a test wants to see what is asked of it. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { success = 0, invalidUsage = 5, inProgress = 7 };

static char record[1 << 16];
static size_t length;
static int polls;         /* how often an operation is in progress yet */
static const char* last = "";
static int suspended;

static void note(const char* format, ...) {
  va_list values;
  va_start(values, format);
  length += vsnprintf(record + length, sizeof record - length, format, values);
  va_end(values);
}

/* For the test: what was asked since the last call; what is to happen. */
const char* fake_calls(void) {
  static char copy[sizeof record];
  memcpy(copy, record, length + 1);
  record[length = 0] = 0;
  return copy;
}
static int delay;  /* polls of what follows; below 0: for ever */
void fake_delay(int polls_) { delay = polls_; }
static int refusal;
void fake_refuse(int result) { refusal = result; }

static int background(void) {
  if (refusal) {
    last = "memory manager is disabled";
    return refusal;
  }
  polls = delay;
  return polls ? inProgress : success;
}

typedef struct { char internal[128]; } Id;

int ncclGetVersion(int* version) { *version = 23007; return success; }
int ncclGetUniqueId(Id* id) { memset(id, 1, sizeof *id); return success; }
const char* ncclGetErrorString(int result) { return result == invalidUsage ? "invalid usage" : "?"; }
const char* ncclGetLastError(void* comm) { return last; }
int ncclCommInitRankConfig(void** comm, int ranks, Id id, int rank, void* config) {
  *comm = malloc(1);
  return success;
}
int ncclCommFinalize(void* comm) { note("finalize "); return success; }
int ncclCommDestroy(void* comm) { note("destroy "); return success; }
int ncclCommAbort(void* comm) { note("abort "); return success; }
int ncclCommSplit(void* comm, int color, int key, void** child, void* config) { return 3; }
int ncclCommGetAsyncError(void* comm, int* state) {
  *state = polls ? inProgress : success;
  polls -= polls > 0;
  return success;
}
int ncclCommCount(void* comm, int* count) { *count = 1; return success; }
int ncclCommUserRank(void* comm, int* rank) { *rank = 0; return success; }
int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int where, void* comm) { return 3; }
int ncclRedOpDestroy(int op, void* comm) { return 3; }
/* Of one rank, and in place: there is nothing to do. */
int ncclAllReduce(void* in, void* out, size_t n, int type, int op, void* comm, void* stream) {
  note("all_reduce ");
  return success;
}
int ncclAllGather(void) { return 3; }
int ncclReduceScatter(void) { return 3; }
int ncclBroadcast(void) { return 3; }
int ncclReduce(void) { return 3; }
int ncclSend(void) { return 3; }
int ncclRecv(void) { return 3; }
int ncclGroupStart(void) { return success; }
int ncclGroupEnd(void) { return success; }

int ncclMemAlloc(void** memory, size_t bytes) { *memory = malloc(bytes); return success; }
int ncclMemFree(void* memory) { note("free:%zu ", (size_t)memory); free(memory); return success; }
int ncclCommRegister(void* comm, void* memory, size_t bytes, void** handle) {
  *handle = memory;
  note("register:%zu:%zu ", (size_t)memory, bytes);
  return refusal;
}
int ncclCommDeregister(void* comm, void* handle) {
  note("deregister:%zu ", (size_t)handle);
  return success;
}
int ncclCommWindowRegister(void* comm, void* memory, size_t bytes, void** window, int flags) {
  *window = memory;
  note("window:%zu:%zu:%d ", (size_t)memory, bytes, flags);
  return background();
}
int ncclCommWindowDeregister(void* comm, void* window) {
  note("no_window:%zu ", (size_t)window);
  return success;
}
int ncclCommSuspend(void* comm, int flags) {
  note("suspend:%d ", flags);
  suspended = !refusal;
  return background();
}
int ncclCommResume(void* comm) {
  note("resume ");
  suspended = 0;
  return background();
}
int ncclCommMemStats(void* comm, int stat, uint64_t* value) {
  *value = stat == 1 ? suspended : 1000 + stat;
  return refusal;
}
