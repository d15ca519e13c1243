// gdn_profile_*: the registered buffer, and its division among launches.
#include "host.cuh"
#include "profile.cuh"

namespace {

#define GDN_PROFILE_NAME(id, name) name,
constexpr const char *kScopes[] = {GDN_PROFILE_SCOPES(GDN_PROFILE_NAME)};
constexpr const char *kRoles[] = {GDN_PROFILE_ROLES(GDN_PROFILE_NAME)};
#undef GDN_PROFILE_NAME

}  // namespace

extern "C" const char *gdn_profile_scope(uint32_t scope) {
  return scope < sizeof(kScopes) / sizeof(*kScopes) ? kScopes[scope] : nullptr;
}

extern "C" const char *gdn_profile_role(uint32_t role) {
  return role < sizeof(kRoles) / sizeof(*kRoles) ? kRoles[role] : nullptr;
}

#ifdef GDN_PROFILE

static_assert(sizeof(gdn_profile_warp) == 64 && sizeof(gdn_profile_event) == 16, "the layout that gdn.h promises");

namespace {

// The free part of the calling thread's buffer.
struct Buffer {
  char *next = nullptr;
  uint64_t warps = 0;
  uint32_t events = 0, launches = 0;
  int device = 0;
};
thread_local Buffer buffer;

uint64_t warp_bytes(uint32_t events) { return sizeof(gdn_profile_warp) + uint64_t{events} * sizeof(gdn_profile_event); }

}  // namespace

int gdn::profile::attach(Target &target, int64_t blocks, int threads) {
  if (!buffer.next) return GDN_OK;
  int device = 0;
  if (const int status = cuda_status(cudaGetDevice(&device))) return status;
  if (device != buffer.device) return GDN_OK;
  const uint64_t warps = static_cast<uint64_t>(blocks) * (threads / 32);
  if (warps > buffer.warps) return GDN_PROFILE_BUFFER;
  target.warps = buffer.next;
  target.events = buffer.events;
  target.launch = ++buffer.launches;
  buffer.next += warps * warp_bytes(buffer.events);
  buffer.warps -= warps;
  return GDN_OK;
}

extern "C" int gdn_profile_set(void *ptr, uint64_t bytes, uint32_t events_per_warp) {
  buffer = Buffer{};
  if (!ptr) return GDN_OK;
  if (!gdn::aligned(ptr, 16) || events_per_warp > INT32_MAX || bytes < warp_bytes(events_per_warp))
    return GDN_PROFILE_BUFFER;
  int device = 0;
  if (const int status = gdn::cuda_status(cudaGetDevice(&device))) return status;
  buffer = {static_cast<char *>(ptr), bytes / warp_bytes(events_per_warp), events_per_warp, 0, device};
  return GDN_OK;
}

#else

extern "C" int gdn_profile_set(void *, uint64_t, uint32_t) { return GDN_NO_PROFILE; }

#endif
