package ctrd_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/resources"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestStartFault has messages that runc 1.1, runc 1.2 and crun returned.
func TestStartFault(t *testing.T) {
	const runc = "failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: "
	for text, want := range map[string]fault.Reason{
		runc + `exec: "nope": executable file not found in $PATH: unknown`:                                                    fault.CommandNotFound,
		runc + `exec: "/nope": stat /nope: no such file or directory: unknown`:                                                fault.CommandNotFound,
		runc + `error during container init: exec: "/nope": stat /nope: no such file or directory: unknown`:                   fault.CommandNotFound,
		"OCI runtime create failed: executable file `nope` not found in $PATH: No such file or directory: unknown":            fault.CommandNotFound,
		runc + `exec: "/data.txt": permission denied: unknown`:                                                                fault.CommandNotExecutable,
		runc + `exec: "/etc": is a directory: unknown`:                                                                        fault.CommandNotExecutable,
		"OCI runtime create failed: open executable: Permission denied: unknown":                                              fault.CommandNotExecutable,
		"OCI runtime start failed: exec /bin/garbage: exec format error: unknown":                                             fault.CommandNotExecutable,
		runc + `chdir to cwd ("/nope") set in config.json failed: permission denied: unknown`:                                 fault.WorkingDirInvalid,
		runc + `error during container init: mkdir /data.txt: not a directory: unknown`:                                       fault.WorkingDirInvalid,
		runc + `error during container init: mkdir /proc/self/fd/10: no such file or directory: unknown`:                      fault.WorkingDirInvalid,
		"OCI runtime create failed: chdir `/data.txt`: Not a directory: unknown":                                              fault.WorkingDirInvalid,
		runc + "exec: \"/bin/sh\": argument list too long: unknown":                                                           fault.InvalidField,
		runc + `error mounting "/x" to rootfs at "/y": mkdir /y: not a directory: unknown`:                                    "",
		runc + "can't get final child's PID from pipe: EOF: unknown":                                                          "",
		runc + "unable to apply cgroup configuration: mkdir /sys/fs/cgroup/pids/kubepods: no such file or directory: unknown": "",
	} {
		require.Equal(t, want, fault.ReasonOf(ctrd.StartFault(errors.New(text), "nope")), text)
	}
	require.NoError(t, ctrd.StartFault(nil, "x"))
}

func TestPullFault(t *testing.T) {
	for _, c := range []struct {
		err    error
		class  error
		reason fault.Reason
	}{
		{fmt.Errorf("resolving: %w", errdefs.ErrNotFound), errdefs.ErrNotFound, fault.ImageNotFound},
		{errors.New("pull access denied, repository does not exist or may require authorization: authorization failed: no basic auth credentials"), errdefs.ErrNotFound, fault.ImageNotFound},
		{errors.New("unexpected status from GET request to http://r/v2/x: 401 Unauthorized"), errdefs.ErrNotFound, fault.ImageNotFound},
		{errors.New("no match for platform in manifest: not found"), errdefs.ErrNotFound, fault.ImageNotFound},
		{errors.New("dial tcp 127.0.0.1:1: connect: connection refused"), errdefs.ErrUnavailable, fault.ImagePullFailed},
		{errors.New("dial tcp: lookup registry.invalid: no such host"), errdefs.ErrUnavailable, fault.ImagePullFailed},
		{errors.New("unexpected status: 503 Service Unavailable"), errdefs.ErrUnavailable, fault.ImagePullFailed},
		{errors.New("apply layer error: failed to extract layer sha256:1: link /s/fs/etc/x /s/fs/hard: no such file or directory"), errdefs.ErrFailedPrecondition, fault.ImageInvalid},
		{errors.New("apply layer error: failed to extract layer sha256:1: mkdir /s/fs/a/b: not a directory"), errdefs.ErrFailedPrecondition, fault.ImageInvalid},
		{errors.New("apply layer error: failed to extract layer sha256:1: link /s/fs/a /s/fs/b: no space left on device"), errdefs.ErrUnavailable, fault.ImagePullFailed},
		{errors.New("unexpected commit digest"), errdefs.ErrUnavailable, fault.ImagePullFailed},
		{errors.New("connect: connection refused to 10.0.0.1:40312"), errdefs.ErrUnavailable, fault.ImagePullFailed},
		{errors.New("unexpected status from HEAD request to http://127.0.0.1:40167/v2/x: 502 Bad Gateway"), errdefs.ErrUnavailable, fault.ImagePullFailed},
		{errors.New("unexpected status from GET request to http://r:4030/v2/x@sha256:404: 503 Service Unavailable"), errdefs.ErrUnavailable, fault.ImagePullFailed},
		{status.Error(codes.Unavailable, `transport: error while dialing: dial unix /run/containerd.sock: connect: no such file`), errdefs.ErrUnavailable, fault.RuntimeUnavailable},
	} {
		err := ctrd.PullFault(c.err, "r/x:1")
		require.ErrorIs(t, err, c.class, c.err)
		require.Equal(t, c.reason, fault.ReasonOf(err), c.err)
	}
	require.ErrorIs(t, ctrd.PullFault(context.Canceled, "x"), context.Canceled)
}

func TestClassify(t *testing.T) {
	require.NoError(t, ctrd.Classify(nil, "x"))
	require.Equal(t, fault.RuntimeUnavailable, fault.ReasonOf(ctrd.Classify(status.Error(codes.Unavailable, "away"), "x")))
	require.ErrorIs(t, ctrd.Classify(status.Error(codes.DeadlineExceeded, "late"), "x"), context.DeadlineExceeded)
	require.ErrorIs(t, ctrd.Classify(status.Error(codes.Canceled, "left"), "x"), context.Canceled)
	require.True(t, errdefs.IsAlreadyExists(ctrd.Classify(status.Error(codes.AlreadyExists, "there"), "x")))
	known := fault.Field("a", "b")
	require.Equal(t, error(known), ctrd.Classify(known, "x"))
}

func TestImageIsBounded(t *testing.T) {
	blob := func(kind string, i int, size int64) ocispec.Descriptor {
		return ocispec.Descriptor{MediaType: kind, Digest: digest.FromString(fmt.Sprint(i)), Size: size}
	}
	layers := func(n int, size int64) (all []ocispec.Descriptor) {
		for i := range n {
			all = append(all, blob(ocispec.MediaTypeImageLayerGzip, i, size))
		}
		return all
	}
	const max = 1 << 30
	manifest, config := blob(ocispec.MediaTypeImageManifest, -1, 1<<20), blob(ocispec.MediaTypeImageConfig, -2, 1<<20)
	root := []ocispec.Descriptor{manifest}
	require.NoError(t, ctrd.Admit(max, root, append(layers(128, 1<<20), config), layers(128, 1<<20)), "each blob counts once")
	for name, c := range map[string]struct {
		calls [][]ocispec.Descriptor
		want  string
	}{
		"manifest":          {[][]ocispec.Descriptor{{blob(ocispec.MediaTypeImageManifest, 0, 1<<20+1)}}, "more than the 1048576 that a manifest"},
		"index":             {[][]ocispec.Descriptor{{blob(ocispec.MediaTypeImageIndex, 0, 1<<40)}}, "more than the 1048576 that a manifest"},
		"configuration":     {[][]ocispec.Descriptor{root, {blob(images.MediaTypeDockerSchema2Config, 0, 1<<21)}}, "more than the 1048576 that a manifest"},
		"layers":            {[][]ocispec.Descriptor{root, layers(129, 1)}, "129 layers"},
		"one layer":         {[][]ocispec.Descriptor{root, layers(1, max)}, "larger than the 1073741824 bytes"},
		"all layers":        {[][]ocispec.Descriptor{root, layers(11, 100<<20)}, "larger than the 1073741824 bytes"},
		"an overflow":       {[][]ocispec.Descriptor{root, layers(3, math.MaxInt64)}, "larger than the 1073741824 bytes"},
		"a negative size":   {[][]ocispec.Descriptor{root, layers(1, -max), layers(1, max)}, "is -1073741824"},
		"no size":           {[][]ocispec.Descriptor{root, layers(1, 0)}, "is 0"},
		"one blob, smaller": {[][]ocispec.Descriptor{root, layers(1, 1), layers(1, max)}, "larger than the 1073741824 bytes"},
		"nested indexes": {slices.Collect(func(yield func([]ocispec.Descriptor) bool) {
			for i := range 300 {
				if !yield([]ocispec.Descriptor{blob(ocispec.MediaTypeImageIndex, i, 1)}) {
					return
				}
			}
		}), "more than 256 blobs"},
	} {
		err := ctrd.Admit(max, c.calls...)
		require.ErrorContains(t, err, c.want, name)
		require.Equal(t, fault.ImageInvalid, fault.ReasonOf(err), name)
		require.True(t, errdefs.IsFailedPrecondition(err), name)
	}
}

func TestDockerConfig(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.json")
	c, err := ctrd.ReadDockerConfig(path)
	require.NoError(t, err, "the secret may be created later")
	user, _, err := c.Credentials("r.example")
	require.NoError(t, err)
	require.Empty(t, user)
	require.NoError(t, os.WriteFile(path, []byte(`{"auths":{
		"r.example":{"auth":"dXNlcjpwYTpzcw=="},
		"https://token.example/v1/":{"identitytoken":"tok"},
		"plain.example:5000":{"username":"u","password":"p"},
		"broken.example":{"auth":"%%%"},
		"https://index.docker.io/v1/":{"username":"hub","password":"s"}}}`), 0o600))
	c, err = ctrd.ReadDockerConfig(path)
	require.NoError(t, err)
	for host, want := range map[string][2]string{
		"r.example": {"user", "pa:ss"}, "token.example": {"", "tok"}, "plain.example:5000": {"u", "p"}, "plain.example": {"", ""},
		"registry-1.docker.io": {"hub", "s"}, "evil-docker.io": {"", ""}, "other.example": {"", ""},
	} {
		user, secret, err := c.Credentials(host)
		require.NoError(t, err)
		require.Equal(t, want, [2]string{user, secret}, host)
	}
	_, _, err = c.Credentials("broken.example")
	require.Error(t, err)
	require.NoError(t, os.WriteFile(path, []byte(`{`), 0o600))
	_, err = ctrd.ReadDockerConfig(path)
	require.Equal(t, fault.ImagePullFailed, fault.ReasonOf(err))
}

func TestCgroups(t *testing.T) {
	require.Equal(t, "/kubepods/pod1", ctrd.CgroupParent("/kubepods/pod1/abc"))
	require.Equal(t, "kubepods-pod1.slice", ctrd.CgroupParent("kubepods-pod1.slice:cri-containerd:abc"))
	path, systemd := ctrd.Cgroup("/kubepods/pod1", "u-1")
	require.Equal(t, "/kubepods/pod1/fsb-u-1", path)
	require.False(t, systemd)
	path, systemd = ctrd.Cgroup("kubepods-pod1.slice", "u-1")
	require.Equal(t, "kubepods-pod1.slice:fsb:u-1", path)
	require.True(t, systemd)
}

func TestCommandAndEnvironment(t *testing.T) {
	img := ocispec.ImageConfig{Entrypoint: []string{"entry"}, Cmd: []string{"cmd"}, Env: []string{"A=image", "B=image"}}
	for _, c := range []struct{ command, args, want []string }{
		{nil, nil, []string{"entry", "cmd"}},
		{nil, []string{"x"}, []string{"entry", "x"}},
		{[]string{"c"}, nil, []string{"c"}},
		{[]string{"c"}, []string{"x", ""}, []string{"c", "x", ""}},
	} {
		got, err := ctrd.CommandLine(runtime.Container{Command: c.command, Args: c.args}, img)
		require.NoError(t, err)
		require.Equal(t, c.want, got)
	}
	_, err := ctrd.CommandLine(runtime.Container{}, ocispec.ImageConfig{})
	require.Equal(t, fault.CommandNotFound, fault.ReasonOf(err))
	env := ctrd.Environment(runtime.Container{Hostname: "h", Env: map[string]string{"B": "mine", "Z": "=z="}}, img, "/home")
	require.Equal(t, []string{"A=image", "B=mine", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOSTNAME=h", "Z==z=", "HOME=/home"}, env)

	// An image may have a variable twice; some programs take the first, some the last.
	twice := ocispec.ImageConfig{Env: []string{"A=1", "PATH=/bin", "A=2", "C=3", "C=4"}}
	env = ctrd.Environment(runtime.Container{Env: map[string]string{"A": "mine"}}, twice, "")
	require.Equal(t, []string{"A=mine", "PATH=/bin", "C=3", "C=4"}, env)
	require.NoError(t, ctrd.CheckProcess(nil, env))
	err = ctrd.CheckProcess(nil, []string{"A=1\x00B=2"})
	require.True(t, errdefs.IsInvalidArgument(err), "%v", err)
}

// TestCredentialsOfOneRegistry: several keys may name a registry; which one applies does not depend on the order of a map.
func TestCredentialsOfOneRegistry(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.json")
	require.NoError(t, os.WriteFile(path, []byte(`{"auths":{
		"https://index.docker.io/v1/":{"username":"url"}, "docker.io":{"username":"host"}, "registry-1.docker.io":{"username":"other"},
		"https://r.example/b":{"username":"b"}, "https://r.example/a":{"username":"a"}
	}}`), 0o600))
	for range 50 {
		c, err := ctrd.ReadDockerConfig(path)
		require.NoError(t, err)
		for host, want := range map[string]string{"docker.io": "host", "index.docker.io": "host", "r.example": "a"} {
			user, _, err := c.Credentials(host)
			require.NoError(t, err)
			require.Equal(t, want, user, host)
		}
	}
}

func TestResources(t *testing.T) {
	r := ctrd.Resources(resources.Limits{})
	require.Nil(t, r.CPU)
	require.Nil(t, r.Memory)
	require.Nil(t, r.Pids)
	require.False(t, r.Devices[0].Allow)
	r = ctrd.Resources(resources.Limits{CPUMillis: 250, MemoryBytes: 1 << 26, PIDs: 9})
	require.Equal(t, int64(25_000), *r.CPU.Quota)
	require.Equal(t, int64(1<<26), *r.Memory.Limit)
	require.Equal(t, int64(1<<26), *r.Memory.Swap)
	require.Equal(t, int64(9), *r.Pids.Limit)
	require.Equal(t, int64(1000), *ctrd.Resources(resources.Limits{CPUMillis: 1}).CPU.Quota, "the kernel accepts no less")
}

// TestCPULimitOfTheParent has the limit of a Pod's cgroup in a legacy hierarchy, where the kernel refuses a child with more.
func TestPullsAreShared(t *testing.T) {
	var runs atomic.Int32
	release := make(chan struct{})
	p := ctrd.NewPulls(func(ctx context.Context, _ string, progress func(runtime.Progress)) error {
		runs.Add(1)
		progress(runtime.Progress{Phase: runtime.PhaseDownloading, Total: 7})
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	defer p.Close()
	var wg sync.WaitGroup
	var reported atomic.Int32
	leaving, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() { left <- p.Do(leaving, "a", func(runtime.Progress) { reported.Add(1) }) }()
	for range 4 {
		wg.Go(func() {
			if err := p.Do(context.Background(), "a", func(runtime.Progress) { reported.Add(1) }); err != nil {
				t.Errorf("pulling: %v", err)
			}
		})
	}
	require.Eventually(t, func() bool { return reported.Load() == 5 }, testkit.Timeout, testkit.Tick)
	leave()
	require.ErrorIs(t, <-left, context.Canceled, "a caller that leaves does not wait")
	close(release)
	wg.Wait()
	require.Equal(t, int32(1), runs.Load())
	require.NoError(t, p.Do(t.Context(), "a", nil))
	require.Equal(t, int32(2), runs.Load(), "a later pull is another one")
}

func TestPullEndsWithItsLastCaller(t *testing.T) {
	started, ended := make(chan struct{}), make(chan struct{})
	p := ctrd.NewPulls(func(ctx context.Context, _ string, _ func(runtime.Progress)) error {
		close(started)
		<-ctx.Done()
		close(ended)
		return ctx.Err()
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Do(ctx, "a", nil) }()
	<-started
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	<-ended
	p.Close()
}

func TestHandlesSignalReadsMasks(t *testing.T) {
	for name, c := range map[string]struct {
		status string
		want   bool
	}{
		"neither caught nor blocked": {"SigBlk:\t0000000000000000\nSigIgn:\t0000000000004000\nSigCgt:\t0000000000000002\n", false},
		"caught":                     {"SigBlk:\t0000000000000000\nSigCgt:\t0000000000004000\n", true},
		"blocked, for sigwait":       {"SigBlk:\t0000000000004000\nSigCgt:\t0000000000000000\n", true},
		"unreadable":                 {"SigBlk:\tx\n", true},
		"empty":                      {"", true},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, c.want, ctrd.HandlesSignal(c.status, syscall.SIGTERM)) })
	}
}
