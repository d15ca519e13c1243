// The launch of a dtype.
#pragma once

#include "product.h"

namespace gdn {
namespace quantized {

template <typename T> int run_product(const Args &args, const LaunchConfig &config, int optin) {
  if (args.rows == 1) return launch_allowed<product_kernel<T, 1>>(config, optin, args);
  if (args.rows == 2) return launch_allowed<product_kernel<T, 2>>(config, optin, args);
  if (args.rows <= 4) return launch_allowed<product_kernel<T, 4>>(config, optin, args);
  return launch_allowed<product_kernel<T, 8>>(config, optin, args);
}

}  // namespace quantized
}  // namespace gdn
