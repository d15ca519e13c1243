//! Free memory.

use candle_core::Device;
use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// Free memory of the device in bytes, where the system says.
pub fn free(device: &Device) -> Option<u64> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        let (free, _) = device.cuda_stream().context().mem_get_info().ok()?;
        return Some(free as u64);
    }
    if !device.is_cpu() {
        return None;
    }
    let machine = available(&read_to_string("/proc/meminfo").ok()?)?;
    let groups = groups(&read_to_string("/proc/self/cgroup").unwrap_or_default());
    let file = |(folder, name): (&Path, &str)| read_to_string(folder.join(name)).unwrap_or_default();
    let left = groups.iter().filter_map(|(folder, [limit, used])| {
        left(&file((folder, limit)), &file((folder, used)), &file((folder, "memory.stat")))
    });
    Some(left.fold(machine, u64::min))
}

/// Of `/proc/meminfo`.
fn available(info: &str) -> Option<u64> {
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.saturating_mul(1024))
}

/// The folders of the control groups of `/proc/self/cgroup` that may limit memory, outer ones too, and the names of limit and use. In a
/// container its own group is the root, whatever the file says.
fn groups(text: &str) -> Vec<(PathBuf, [&'static str; 2])> {
    const V1: [&str; 2] = ["memory.limit_in_bytes", "memory.usage_in_bytes"];
    const V2: [&str; 2] = ["memory.max", "memory.current"];
    let mut all = Vec::new();
    for line in text.lines() {
        let (root, names, path) = match line.splitn(3, ':').collect::<Vec<_>>()[..] {
            [_, "", path] => ("/sys/fs/cgroup", V2, path),
            [_, of, path] if of.split(',').any(|of| of == "memory") => ("/sys/fs/cgroup/memory", V1, path),
            _ => continue,
        };
        let outer = Path::new(path.trim_start_matches('/')).ancestors();
        all.extend(outer.map(|path| (Path::new(root).join(path), names)));
    }
    all
}

/// What a group may still use: the pages of files that it has read are given back. `None` without a limit.
fn left(limit: &str, used: &str, stat: &str) -> Option<u64> {
    let limit: u64 = limit.trim().parse().ok()?;
    let of_files =
        stat.lines().filter_map(|line| line.strip_prefix("inactive_file ").or(line.strip_prefix("active_file ")));
    let of_files = of_files.filter_map(|bytes| bytes.trim().parse::<u64>().ok()).fold(0, u64::saturating_add);
    Some(limit.saturating_sub(used.trim().parse::<u64>().ok()?.saturating_sub(of_files)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_says() {
        assert_eq!(available("MemTotal: 9 kB\nMemAvailable:    3 kB\n"), Some(3072));
        assert_eq!(available("MemTotal: 9 kB\n"), None);
        for (limit, used, stat, want) in [
            ("max\n", "5\n", "", None),
            ("", "", "", None),
            ("1000\n", "400\n", "", Some(600)),
            ("1000\n", "900\n", "anon 200\ninactive_file 300\nactive_file 400\nshmem 50\n", Some(800)),
            ("1000", "1200", "file 9", Some(0)),
            // The first version without a limit.
            ("9223372036854771712", "400", "", Some(9223372036854771312)),
        ] {
            assert_eq!(left(limit, used, stat), want, "{limit} {used} {stat}");
        }
    }

    #[test]
    fn the_groups_of_a_process() {
        let of = |text: &str| -> Vec<String> {
            groups(text)
                .iter()
                .map(|(folder, [limit, _])| format!("{}/{limit}", folder.display().to_string().trim_end_matches('/')))
                .collect()
        };
        let v2 = ["/sys/fs/cgroup/a/b/memory.max", "/sys/fs/cgroup/a/memory.max", "/sys/fs/cgroup/memory.max"];
        assert_eq!(of("0::/a/b\n"), v2);
        assert_eq!(of("0::/\n"), v2[2..]);
        let v1 = ["/sys/fs/cgroup/memory/d/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
        assert_eq!(of("5:cpu,cpuacct:/d\n4:memory:/d\n"), v1);
        assert!(of("").is_empty());
    }
}
