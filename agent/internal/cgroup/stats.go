package cgroup

import (
	"fmt"

	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/types/known/anypb"
)

// Stats returns what a cgroup has used, as containerd's metrics: io.containerd.cgroups.v1.Metrics, or v2.
func (t *Tree) Stats(path string) (*anypb.Any, error) {
	var stats any
	if t.unified {
		manager, err := cgroup2.Load(path, cgroup2.WithMountpoint(t.root))
		if err != nil {
			return nil, fmt.Errorf("reading cgroup %s: %w", path, err)
		}
		if stats, err = manager.Stat(); err != nil {
			return nil, fmt.Errorf("reading cgroup %s: %w", path, err)
		}
	} else {
		group, err := cgroup1.Load(cgroup1.StaticPath(path))
		if err != nil {
			return nil, fmt.Errorf("reading cgroup %s: %w", path, err)
		}
		if stats, err = group.Stat(cgroup1.IgnoreNotExist); err != nil {
			return nil, fmt.Errorf("reading cgroup %s: %w", path, err)
		}
	}
	out, err := typeurl.MarshalAnyToProto(stats)
	if err != nil {
		return nil, fmt.Errorf("encoding what cgroup %s has used: %w", path, err)
	}
	return out, nil
}
