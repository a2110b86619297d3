package rpc_test

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
)

// leader implements rpc.Leader with a term that the test sets.
type leader struct{ term, superseded atomic.Int64 }

func (l *leader) Term() int64           { return l.term.Load() }
func (l *leader) Superseded(term int64) { l.superseded.Store(term) }

func TestCallsCarryTheTerm(t *testing.T) {
	ca := pki.New(t)
	const known = 5
	server, err := rpc.NewServer(t.Context(), rpc.ServerConfig{
		Address: "127.0.0.1:0", TLS: ca.TLS(t, rpc.RoleAgent), DrainTimeout: time.Second, Allow: everything(rpc.RoleAllocator),
		Guard: func(ctx context.Context, _ string) error {
			term, err := rpc.TermOf(ctx)
			if err != nil || term >= known {
				return err
			}
			return fault.New(errdefs.ErrFailedPrecondition, fault.LeaderSuperseded, "term %d is over", term).
				With(rpc.TermMetadata, strconv.Itoa(known))
		},
	})
	require.NoError(t, err)
	sandboxv1.RegisterSandboxServiceServer(server, sandboxes{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })

	l := &leader{}
	client := dial(t, server, rpc.ClientConfig{TLS: ca.TLS(t, rpc.RoleAllocator), ServerName: rpc.RoleAgent.ServerName(), Leader: l})
	get := func(ctx context.Context) error {
		_, err := client.GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: "ns", Name: "a"})
		return rpc.FromStatus(err)
	}
	logs := func() error {
		stream, err := client.StreamLogs(t.Context(), &sandboxv1.StreamLogsRequest{Namespace: "ns", Name: "n"})
		require.NoError(t, err)
		_, err = stream.Recv()
		return rpc.FromStatus(err)
	}
	for name, call := range map[string]func() error{"unary": func() error { return get(t.Context()) }, "stream": logs} {
		for _, term := range []int64{0, known - 1} {
			l.term.Store(term)
			l.superseded.Store(0)
			require.Equal(t, fault.LeaderSuperseded, fault.ReasonOf(call()), "%s in term %d", name, term)
			require.EqualValues(t, known, l.superseded.Load(), "the refusal is reported to the leader")
		}
	}
	l.term.Store(known)
	require.NoError(t, get(t.Context()))

	l.term.Store(0)
	for _, nonsense := range []string{"x", "-1", "99999999999999999999"} {
		err := get(metadata.AppendToOutgoingContext(t.Context(), rpc.TermKey, nonsense))
		require.Equal(t, fault.InvalidField, fault.ReasonOf(err), nonsense)
	}
}

func TestConfiguredInterceptorsRunAfterAllChecks(t *testing.T) {
	ca := pki.New(t)
	var seen atomic.Int32
	server, err := rpc.NewServer(t.Context(), rpc.ServerConfig{
		Address: "127.0.0.1:0", TLS: ca.TLS(t, rpc.RoleAllocator), DrainTimeout: time.Second, Allow: everything(rpc.RoleController),
		Unary: []grpc.UnaryServerInterceptor{func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			seen.Add(1)
			return handle(ctx, req)
		}},
	})
	require.NoError(t, err)
	sandboxv1.RegisterSandboxServiceServer(server, sandboxes{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	client := dial(t, server, rpc.ClientConfig{TLS: ca.TLS(t, rpc.RoleController), ServerName: rpc.RoleAllocator.ServerName()})
	_, err = client.GetSandbox(t.Context(), &sandboxv1.GetSandboxRequest{Namespace: "ns", Name: "No_Label"})
	require.Equal(t, fault.InvalidField, fault.ReasonOf(rpc.FromStatus(err)))
	require.Zero(t, seen.Load(), "a refused call must not reach the interceptor")
	_, err = client.GetSandbox(t.Context(), &sandboxv1.GetSandboxRequest{Namespace: "ns", Name: "a"})
	require.NoError(t, err)
	require.EqualValues(t, 1, seen.Load())
}

// everything lets a role call SandboxService.
func everything(role rpc.Role) map[string][]rpc.Role {
	return map[string][]rpc.Role{sandboxv1.SandboxService_ServiceDesc.ServiceName: {role}}
}
