//go:build integration

package observe_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/go-logr/logr"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/observe"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// forbidden is an API server that must not be asked.
type forbidden struct{ t *testing.T }

func (f forbidden) Pods(context.Context) (map[string]bool, error) {
	f.t.Error("the Pods were asked for")
	return nil, errors.New("forbidden")
}

func (f forbidden) Sandbox(context.Context, string, string) (*v1alpha1.Sandbox, error) {
	f.t.Error("a Sandbox was asked for")
	return nil, errors.New("forbidden")
}

// TestScanOfAThousand scans a real containerd with a thousand healthy containers, without a request to the API server.
func TestScanOfAThousand(t *testing.T) {
	const count, scans = 1000, 5
	s := containerd.Start(t)
	remover := &ctrd.Remover{
		Client: s.Client, Snapshotter: ctrd.DefaultSnapshotter, LogRoot: s.LogRoot, ProcRoot: "/proc", CgroupRoot: ctrd.DefaultCgroupRoot,
		FIFORoot: s.Dir + "/fifo", HostProc: "/proc/self", StateDir: s.Dir + "/s", CgroupParents: []string{s.CgroupParent},
	}
	b := observe.New(observe.Config{
		Node: &observe.Containerd{Remover: remover}, API: forbidden{t}, Policy: verdict.Policy{Grace: time.Hour, LeftoverGrace: time.Hour},
		ScanInterval: time.Minute, Orphan: func(k observe.Key) { t.Errorf("%s is no orphan", k.ID) }, Log: logr.Discard(),
	})
	defer func() {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.NoError(t, b.Run(ctx))
	}()
	b.SetPod("agent", false)
	// A spec of a sandbox's size.
	spec, err := anypb.New(&anypb.Any{Value: make([]byte, 8<<10)})
	require.NoError(t, err)
	var ids []string
	for i := range count {
		id := identity.Identity{
			Namespace: "ns", Name: fmt.Sprintf("one-%d", i), SandboxUID: uuid.NewString(), Attempt: 1, AgentUID: "agent", Pool: "p",
			State: identity.StateClaimed, Persisted: true,
		}
		ids = append(ids, id.ContainerID())
		_, err := s.Client.ContainerService().Create(t.Context(), containers.Container{
			ID: id.ContainerID(), Labels: id.Labels(), Spec: spec, Runtime: containers.RuntimeInfo{Name: "io.containerd.runc.v2"},
		})
		require.NoError(t, err)
		sandbox := sandbox(id.SandboxUID, "agent", 1)
		sandbox.Name = id.Name
		b.SetSandbox(&sandbox.ObjectMeta)
	}
	b.SetSynced()
	before, began := cpu(t), time.Now()
	for range scans {
		require.NoError(t, b.Scan(t.Context()))
	}
	t.Logf("one scan of %d containers: %s wall, %s CPU of the janitor", count, (time.Since(began) / scans).Round(10*time.Microsecond), ((cpu(t) - before) / scans).Round(10*time.Microsecond))
	found, err := b.Findings()
	require.NoError(t, err)
	require.Len(t, found, count)
	for _, f := range found {
		require.Equal(t, verdict.Assigned, f.Verdict.Reason)
	}
	for _, id := range ids {
		require.NoError(t, s.Client.ContainerService().Delete(t.Context(), id))
	}
}

// cpu returns this process's CPU time.
func cpu(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	require.NoError(t, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
