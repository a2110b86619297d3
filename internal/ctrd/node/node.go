// Package node has what programs without a containerd client, such as the shim, share with those that have one: names and formats on a node.
package node

import (
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// CgroupPrefix begins the name of every sandbox's cgroup, which ends in the container's id.
const CgroupPrefix = "fsb-"

// LimitFile is the name of a file beside a log. It has the number of bytes of output that the agent keeps, in decimal.
const LimitFile = "limit"

const trimBlock = 4096

// CgroupPath returns the path of a cgroup below the hierarchies' roots, given the OCI spec's value: a path, or, for systemd,
// slice:prefix:name (`a-b.slice:fsb:u-1` is /a.slice/a-b.slice/fsb-u-1.scope).
func CgroupPath(spec string) string {
	parts := strings.Split(spec, ":")
	if len(parts) != 3 || !strings.HasSuffix(parts[0], ".slice") {
		return spec
	}
	path := "/"
	name := strings.TrimSuffix(parts[0], ".slice")
	for at := range name {
		if name[at] == '-' {
			path = filepath.Join(path, name[:at]+".slice")
		}
	}
	return filepath.Join(path, parts[0], parts[1]+"-"+parts[2]+".scope")
}

// TrimLog frees the oldest blocks of a log of a size, so that seven eighths of limit are left: then it need not be called at every
// check. Offsets keep their meaning, and the process that appends to the file is not affected. It returns where the rest begins.
func TrimLog(f *os.File, size, limit int64) (int64, error) {
	start := (size - limit + limit/8) / trimBlock * trimBlock
	if start <= 0 {
		return 0, nil
	}
	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, start); err != nil {
		return 0, &os.PathError{Op: "freeing the oldest part of", Path: f.Name(), Err: err}
	}
	return start, nil
}
