package cmd_test

import (
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// TestWatchDirectory: a stream that breaks is opened again, and what may have been lost is said; an error that lasts ends the watch.
func TestWatchDirectory(t *testing.T) {
	b, f := copying(t)
	type stream = filesystemv1.FilesystemService_WatchDirectoryServer
	event := func(kind filesystemv1.WatchDirectoryResponse_Type, path string) *filesystemv1.WatchDirectoryResponse {
		return &filesystemv1.WatchDirectoryResponse{Type: kind, Path: path}
	}
	var asked []*filesystemv1.WatchDirectoryRequest
	answer := func(err error, events ...*filesystemv1.WatchDirectoryResponse) func(*filesystemv1.WatchDirectoryRequest, stream) error {
		return func(in *filesystemv1.WatchDirectoryRequest, s stream) error {
			asked = append(asked, in)
			for _, e := range events {
				if err := s.Send(e); err != nil {
					return err
				}
			}
			return err
		}
	}
	started := event(filesystemv1.WatchDirectoryResponse_TYPE_STARTED, "")
	f.watches = append(f.watches,
		answer(fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "stopping"), started, event(filesystemv1.WatchDirectoryResponse_TYPE_CREATED, "/data/a b"),
			event(filesystemv1.WatchDirectoryResponse_TYPE_KEEPALIVE, ""), event(filesystemv1.WatchDirectoryResponse_TYPE_WRITTEN, "/data/\x1b[2Jx")),
		answer(fault.New(errdefs.ErrNotFound, fault.FileNotFound, "there is no such directory"), started, event(filesystemv1.WatchDirectoryResponse_TYPE_REMOVED, "/data/a b")),
	)
	r := b.run(t, "watch", "web:/data", "--recursive", "-u", "app")
	require.Equal(t, "STARTED     /data\nCREATED     /data/a b\nWRITTEN     \"/data/\\x1b[2Jx\"\nOVERFLOW    /data/\nREMOVED     /data/a b\n", r.out)
	require.Equal(t, 3, r.code, r.err)
	require.Len(t, asked, 2)
	require.Equal(t, "web", asked[1].GetName())
	require.Equal(t, "/data", asked[1].GetPath())
	require.Equal(t, "app", asked[1].GetUser())
	require.True(t, asked[1].GetRecursive())

	for _, wrong := range [][]string{
		{"watch", "web:/data", "--pool", "p"}, {"watch", "web", "--recursive"}, {"watch", "Web:/data"}, {"watch", "./web:/data"}, {"watch", "a", "b"},
	} {
		require.Equal(t, 2, b.run(t, wrong...).code, wrong)
	}
}
