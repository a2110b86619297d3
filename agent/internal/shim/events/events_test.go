package events_test

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"sync"
	"testing"

	eventtypes "github.com/containerd/containerd/api/events"
	eventsapi "github.com/containerd/containerd/api/services/ttrpc/events/v1"
	"github.com/containerd/ttrpc"
	"github.com/containerd/typeurl/v2"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/events"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// receiver is containerd. It refuses some calls at first.
type receiver struct {
	mu      sync.Mutex
	refuses int
	got     []string
}

func (r *receiver) Forward(_ context.Context, req *eventsapi.ForwardRequest) (*emptypb.Empty, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.refuses--; r.refuses >= 0 {
		return nil, errors.New("not now")
	}
	var e eventtypes.TaskStart
	if err := typeurl.UnmarshalTo(req.GetEnvelope().GetEvent(), &e); err != nil {
		return nil, err
	}
	r.got = append(r.got, req.GetEnvelope().GetNamespace()+req.GetEnvelope().GetTopic()+" "+e.GetContainerID())
	return &emptypb.Empty{}, nil
}

// TestEventsWaitForContainerd: what is published before containerd is there, and what it refuses, comes in order.
func TestEventsWaitForContainerd(t *testing.T) {
	address := filepath.Join(t.TempDir(), "s")
	p := events.New("ns", address)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p.Run()
	}()
	for _, id := range []string{"a", "b", "c"} {
		p.Publish("/tasks/start", &eventtypes.TaskStart{ContainerID: id})
	}
	l, err := net.Listen("unix", address) //nolint:noctx // a test's
	require.NoError(t, err)
	server, err := ttrpc.NewServer()
	require.NoError(t, err)
	r := &receiver{refuses: 2}
	eventsapi.RegisterTTRPCEventsService(server, r)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(context.Background(), l)
	}()
	require.Eventually(t, func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.got) == 3
	}, testkit.Timeout, testkit.Tick)
	require.Equal(t, []string{"ns/tasks/start a", "ns/tasks/start b", "ns/tasks/start c"}, r.got)
	require.NoError(t, server.Close())
	<-served
	p.Publish("/tasks/start", &eventtypes.TaskStart{ContainerID: "lost"})
	p.Close()
	<-ended
}
