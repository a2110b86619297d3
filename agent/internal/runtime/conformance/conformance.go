// Package conformance is the test suite that every runtime.Runtime passes: the fake in unit tests, containerd in integration
// tests, so that what is tested against the fake holds for containerd.
package conformance

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// Setup is a runtime to test and what the suite needs around it.
type Setup struct {
	// Runtime has no containers.
	Runtime runtime.Runtime
	// Image has sh, sleep, echo, a file /data.txt that is not executable; its command is `sh -c "echo default command"`.
	Image string
	// OtherImage is another local image with other layers; only RunSlots needs it.
	OtherImage string
	// MissingImage is a reference that its registry does not have; AwayImage one whose registry does not answer.
	MissingImage, AwayImage string
	// UnknownUserImage is a local image whose user is not in its /etc/passwd.
	UnknownUserImage string
	// BrokenImage is a reference to an image whose layer is not an archive.
	BrokenImage string
	// LogRoot holds the containers' log directories.
	LogRoot string
	// KeepsAlive: the runtime has containers without a process of their own.
	KeepsAlive bool
}

// test is one test of the suite.
type test struct {
	name string
	run  func(*testing.T, *suite)
}

// Run tests a runtime; setup is called for each test.
func Run(t *testing.T, setup func(t *testing.T) Setup) {
	t.Helper()
	run(t, setup, false, append(processes(), []test{
		{"stages come in order", stages},
		{"a failed create is deleted completely", failedCreate},
		{"an existing container is kept", exists},
		{"images are listed and watched", images},
	}...))
}

// processes returns the tests of running containers, however they were started.
func processes() []test {
	return []test{
		{"a container runs and ends", life},
		{"an invalid request has a reason", faults},
		{"a signal ends a process", signals},
		{"a container is kept alive without a process", keepAlive},
		{"delete kills processes and can be repeated", deletes},
		{"a finished container keeps its report", finishes},
		{"labels are durable", labels},
		{"list selects by label", lists},
		{"waiting ends with the context", waits},
	}
}

func run(t *testing.T, setup func(t *testing.T) Setup, slots bool, tests []test) {
	t.Helper()
	for _, c := range tests {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
			defer cancel()
			s := &suite{Setup: setup(t), ctx: ctx}
			if slots {
				s.slots = s.Runtime.(runtime.Slots)
			}
			c.run(t, s)
		})
	}
}

type suite struct {
	Setup

	ctx context.Context //nolint:containedctx // of one test
	// slots starts the containers; nil for Create and Start.
	slots runtime.Slots
}

func (s *suite) container(t *testing.T, command ...string) runtime.Container {
	t.Helper()
	id := uuid.NewString() + "-1"
	if s.slots != nil {
		id = "slot." + id
	}
	dir := filepath.Join(s.LogRoot, id)
	makeLog(t, filepath.Join(dir, "output.log"))
	record, err := anypb.New(durationpb.New(time.Minute))
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Timeout)
		defer cancel()
		require.NoError(t, s.Runtime.Delete(ctx, id))
		require.NoError(t, os.RemoveAll(dir))
	})
	c := runtime.Container{
		ID: id, Image: s.Image, Command: command, Record: record, Hostname: "host", LogPath: filepath.Join(dir, "output.log"),
		HostnamePath: filepath.Join(dir, "hostname"),
		Labels:       map[string]string{"test": id, "fast-sandbox.io/managed": "true"}, Network: runtime.NetworkNone,
	}
	if s.slots != nil {
		c.Network, c.Labels["fast-sandbox.io/state"] = runtime.NetworkAgent, "claimed"
		s.startSlot(t, c)
	}
	return c
}

// launch starts a container.
func (s *suite) launch(c runtime.Container) error {
	if s.slots != nil {
		if err := s.slots.Claim(s.ctx, c, func(runtime.Stage) {}); err != nil {
			return err
		}
		return s.slots.SlotClaimed(c.ID)
	}
	if err := s.Runtime.Create(s.ctx, c, func(runtime.Stage) {}); err != nil {
		return err
	}
	return s.Runtime.Start(s.ctx, c.ID)
}

func (s *suite) start(t *testing.T, command ...string) runtime.Container {
	t.Helper()
	c := s.container(t, command...)
	require.NoError(t, s.launch(c))
	return c
}

func (s *suite) found(t *testing.T, id string) *runtime.Found {
	t.Helper()
	list, err := s.Runtime.List(s.ctx, map[string]string{"test": id})
	require.NoError(t, err)
	if len(list) == 0 {
		return nil
	}
	require.Len(t, list, 1)
	return &list[0]
}

func life(t *testing.T, s *suite) {
	require.NoError(t, s.Runtime.Ping(s.ctx))
	c := s.start(t, "sh", "-c", "exit 3")
	exit, err := s.Runtime.Wait(s.ctx, c.ID)
	require.NoError(t, err)
	require.Equal(t, int32(3), exit.Code)
	require.False(t, exit.OOMKilled)
	require.WithinDuration(t, time.Now(), exit.At, time.Minute)
	again, err := s.Runtime.Wait(s.ctx, c.ID)
	require.NoError(t, err)
	require.Equal(t, exit.Code, again.Code)
	require.Equal(t, runtime.TaskStopped, s.found(t, c.ID).Task)
	require.NoError(t, s.Runtime.Delete(s.ctx, c.ID))
	require.Nil(t, s.found(t, c.ID))
}

func stages(t *testing.T, s *suite) {
	c := s.container(t, "sleep", "1000")
	var reached []runtime.Stage
	require.NoError(t, s.Runtime.Create(s.ctx, c, func(st runtime.Stage) { reached = append(reached, st) }))
	found := s.found(t, c.ID)
	require.True(t, found.Task == runtime.TaskCreated || found.Claiming, "%+v", found)
	require.Equal(t, []runtime.Stage{runtime.StageImage, runtime.StageSnapshot, runtime.StageContainer, runtime.StageTask}, reached)
}

func faults(t *testing.T, s *suite) {
	for _, c := range []struct {
		name   string
		change func(*runtime.Container)
		class  error
		reason fault.Reason
	}{
		{"reference", func(c *runtime.Container) { c.Image = "Not A Reference" }, errdefs.ErrInvalidArgument, fault.InvalidField},
		{"missing image", func(c *runtime.Container) { c.Image = s.MissingImage }, errdefs.ErrNotFound, fault.ImageNotFound},
		{"registry away", func(c *runtime.Container) { c.Image = s.AwayImage }, errdefs.ErrUnavailable, fault.ImagePullFailed},
		{"broken image", func(c *runtime.Container) { c.Image = s.BrokenImage }, errdefs.ErrFailedPrecondition, fault.ImageInvalid},
		{"arguments too long", func(c *runtime.Container) { c.Args = []string{strings.Repeat("x", 200<<10)} }, errdefs.ErrInvalidArgument, fault.InvalidField},
		{"unknown user", func(c *runtime.Container) { c.Image = s.UnknownUserImage }, errdefs.ErrFailedPrecondition, fault.UserNotFound},
		{"no such command", func(c *runtime.Container) { c.Command = []string{"nope"} }, errdefs.ErrFailedPrecondition, fault.CommandNotFound},
		{"no such path", func(c *runtime.Container) { c.Command = []string{"/nope/nope"} }, errdefs.ErrFailedPrecondition, fault.CommandNotFound},
		{"not executable", func(c *runtime.Container) { c.Command = []string{"/data.txt"} }, errdefs.ErrFailedPrecondition, fault.CommandNotExecutable},
		{"a directory", func(c *runtime.Container) { c.Command = []string{"/etc"} }, errdefs.ErrFailedPrecondition, fault.CommandNotExecutable},
		{"working directory", func(c *runtime.Container) { c.WorkingDir = "/data.txt" }, errdefs.ErrFailedPrecondition, fault.WorkingDirInvalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			container := s.container(t, "sleep", "1000")
			c.change(&container)
			err := s.launch(container)
			require.ErrorIs(t, err, c.class)
			require.Equal(t, c.reason, fault.ReasonOf(err), "%v", err)
			require.NoError(t, s.Runtime.Delete(s.ctx, container.ID))
			require.Nil(t, s.found(t, container.ID))
		})
	}
}

// makeLog creates an empty log: a container's log must exist.
func makeLog(t *testing.T, path string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(path), "hostname"), []byte("host\n"), 0o644)) //nolint:gosec // as package logs creates it
}

func failedCreate(t *testing.T, s *suite) {
	c := s.container(t, "nope")
	require.Error(t, s.launch(c))
	require.NoError(t, s.Runtime.Delete(s.ctx, c.ID))
	// The id can be used again.
	c.Command = []string{"sleep", "1000"}
	makeLog(t, c.LogPath)
	require.NoError(t, s.Runtime.Create(s.ctx, c, func(runtime.Stage) {}))
}

func exists(t *testing.T, s *suite) {
	c := s.start(t, "sleep", "1000")
	err := s.Runtime.Create(s.ctx, c, func(runtime.Stage) {})
	require.True(t, errdefs.IsAlreadyExists(err), "%v", err)
	require.Equal(t, runtime.TaskRunning, s.found(t, c.ID).Task)
}

func signals(t *testing.T, s *suite) {
	c := s.start(t, "sh", "-c", "trap 'exit 7' TERM; while :; do sleep 0.05; done")
	require.Eventually(t, func() bool { return s.Runtime.HandlesSignal(s.ctx, c.ID, syscall.SIGTERM) }, testkit.Timeout, 10*time.Millisecond)
	for range 20 {
		ignores := s.start(t, "sleep", "1000")
		if s.Runtime.HandlesSignal(s.ctx, ignores.ID, syscall.SIGTERM) { // as soon as it is started
			require.NoError(t, s.Runtime.Signal(s.ctx, ignores.ID, syscall.SIGTERM, false))
			exit, err := s.Runtime.Wait(s.ctx, ignores.ID)
			require.NoError(t, err)
			require.Equal(t, int32(128+syscall.SIGTERM), exit.Code, "it is not the first process, so that the signal ends it")
		}
		require.NoError(t, s.Runtime.Delete(s.ctx, ignores.ID))
	}
	require.True(t, s.Runtime.HandlesSignal(s.ctx, "unknown-1", syscall.SIGTERM), "in doubt")
	require.Eventually(t, func() bool {
		require.NoError(t, s.Runtime.Signal(s.ctx, c.ID, syscall.SIGTERM, false))
		return s.found(t, c.ID).Task == runtime.TaskStopped
	}, testkit.Timeout, 50*time.Millisecond)
	exit, err := s.Runtime.Wait(s.ctx, c.ID)
	require.NoError(t, err)
	require.Equal(t, int32(7), exit.Code)
	require.NoError(t, s.Runtime.Signal(s.ctx, c.ID, syscall.SIGKILL, true), "a process that has ended")
	require.True(t, errdefs.IsNotFound(s.Runtime.Signal(s.ctx, "unknown-1", syscall.SIGKILL, true)))
}

func deletes(t *testing.T, s *suite) {
	c := s.start(t, "sleep", "1000")
	require.NoError(t, s.Runtime.Delete(s.ctx, c.ID))
	require.Nil(t, s.found(t, c.ID))
	require.NoDirExists(t, filepath.Dir(c.LogPath))
	require.NoError(t, s.Runtime.Delete(s.ctx, c.ID))
	require.NoError(t, s.Runtime.Delete(s.ctx, "unknown-1"))
	_, err := s.Runtime.Wait(s.ctx, c.ID)
	require.True(t, errdefs.IsNotFound(err), "%v", err)
}

func finishes(t *testing.T, s *suite) {
	c := s.start(t, "sh", "-c", "true")
	_, err := s.Runtime.Wait(s.ctx, c.ID)
	require.NoError(t, err)
	report, err := anypb.New(durationpb.New(time.Hour))
	require.NoError(t, err)
	for range 2 {
		require.NoError(t, s.Runtime.Finish(s.ctx, c.ID, report))
		f := s.found(t, c.ID)
		require.Equal(t, runtime.TaskNone, f.Task)
		require.Equal(t, report.GetValue(), f.Report.GetValue())
		require.Equal(t, c.Record.GetValue(), f.Record.GetValue())
	}
	require.True(t, errdefs.IsNotFound(s.Runtime.Finish(s.ctx, "unknown-1", report)))
}

func labels(t *testing.T, s *suite) {
	c := s.start(t, "sleep", "1000")
	for range 2 {
		require.NoError(t, s.Runtime.SetLabel(s.ctx, c.ID, "fast-sandbox.io/persisted", "true"))
	}
	f := s.found(t, c.ID)
	require.Equal(t, "true", f.Labels["fast-sandbox.io/persisted"])
	require.Equal(t, c.ID, f.Labels["test"])
	require.True(t, errdefs.IsNotFound(s.Runtime.SetLabel(s.ctx, "unknown-1", "a", "b")))
}

func lists(t *testing.T, s *suite) {
	a, b := s.start(t, "sleep", "1000"), s.start(t, "sleep", "1000")
	list, err := s.Runtime.List(s.ctx, map[string]string{"fast-sandbox.io/managed": "true"})
	require.NoError(t, err)
	var ids []string
	for _, f := range list {
		ids = append(ids, f.ID)
	}
	require.ElementsMatch(t, []string{a.ID, b.ID}, ids)
	require.IsIncreasing(t, ids)
	list, err = s.Runtime.List(s.ctx, map[string]string{"fast-sandbox.io/managed": "true", "test": b.ID})
	require.NoError(t, err)
	require.Len(t, list, 1)
	list, err = s.Runtime.List(s.ctx, map[string]string{"test": "none"})
	require.NoError(t, err)
	require.Empty(t, list)
}

func images(t *testing.T, s *suite) {
	list, err := s.Runtime.Images(s.ctx)
	require.NoError(t, err)
	name, err := runtime.NormalizeImage(s.Image)
	require.NoError(t, err)
	require.Contains(t, list, name)
	require.IsIncreasing(t, list)
	ctx, cancel := context.WithCancel(s.ctx)
	done := make(chan error, 1)
	go func() { done <- s.Runtime.WatchImages(ctx, func() {}) }()
	cancel()
	require.NoError(t, <-done)
}

func waits(t *testing.T, s *suite) {
	c := s.start(t, "sleep", "1000")
	ctx, cancel := context.WithTimeout(s.ctx, 50*time.Millisecond)
	defer cancel()
	_, err := s.Runtime.Wait(ctx, c.ID)
	require.ErrorIs(t, err, context.DeadlineExceeded)
}
