package terms_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/url"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/state"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/terms"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const create = agentv1.AgentService_CreateSandbox_FullMethodName

// call returns the context of a call of a role; term is its metadata, if any.
func call(t *testing.T, role rpc.Role, term ...string) context.Context {
	t.Helper()
	ctx := t.Context()
	if role != "" {
		uri, err := url.Parse("spiffe://" + rpc.Domain + "/" + string(role))
		require.NoError(t, err)
		chain := []*x509.Certificate{{URIs: []*url.URL{uri}}}
		ctx = peer.NewContext(ctx, &peer.Peer{AuthInfo: credentials.TLSInfo{State: tls.ConnectionState{
			PeerCertificates: chain, VerifiedChains: [][]*x509.Certificate{chain},
		}}})
	}
	md := metadata.MD{}
	md.Append(rpc.TermKey, term...)
	return metadata.NewIncomingContext(ctx, md)
}

func requireSuperseded(t *testing.T, err error, highest string) {
	t.Helper()
	require.True(t, errdefs.IsFailedPrecondition(err), "%v", err)
	require.Equal(t, fault.LeaderSuperseded, fault.ReasonOf(err))
	var f *fault.Error
	require.ErrorAs(t, err, &f)
	require.Equal(t, highest, f.Metadata()[rpc.TermMetadata])
}

// store counts writes, and fails them while broken.
type store struct {
	*state.Dir

	writes atomic.Int32
	broken atomic.Bool
}

func (s *store) Write(name string, data []byte) error {
	s.writes.Add(1)
	if s.broken.Load() {
		return errors.New("no space left on device")
	}
	return s.Dir.Write(name, data)
}

func open(t *testing.T, path string) (*terms.Fence, *store, map[string]int64) {
	t.Helper()
	dir, err := state.Open(path)
	require.NoError(t, err)
	s, raised := &store{Dir: dir}, map[string]int64{}
	f, err := terms.Open(s, func(role string, term int64) { raised[role] = term })
	require.NoError(t, err)
	return f, s, raised
}

func TestLowerTermsAreRefused(t *testing.T) {
	f, s, raised := open(t, t.TempDir())
	require.NoError(t, f.Guard(call(t, rpc.RoleAllocator), create), "no term is known, none is needed")
	require.Zero(t, s.writes.Load())
	for range 2 {
		require.NoError(t, f.Guard(call(t, rpc.RoleAllocator, "5"), create))
	}
	require.Equal(t, int32(1), s.writes.Load(), "nothing is written unless a term grows")
	require.Equal(t, map[string]int64{"allocator": 5}, raised)
	requireSuperseded(t, f.Guard(call(t, rpc.RoleAllocator, "4"), create), "5")
	requireSuperseded(t, f.Guard(call(t, rpc.RoleAllocator), create), "5")
	require.NoError(t, f.Guard(call(t, rpc.RoleController, "1"), create), "each kind has its own terms")
	require.NoError(t, f.Guard(call(t, ""), create), "as have those without a certificate")
	require.NoError(t, f.Guard(call(t, "", "2"), create))
	requireSuperseded(t, f.Guard(call(t, "", "1"), create), "2")
	require.NoError(t, f.Guard(call(t, rpc.RoleAllocator, "5"), create))
	for _, term := range []string{"x", "-1", "", "99999999999999999999"} {
		require.True(t, errdefs.IsInvalidArgument(f.Guard(call(t, rpc.RoleAllocator, term), create)), term)
	}
	require.True(t, errdefs.IsInvalidArgument(f.Guard(call(t, rpc.RoleAllocator, "6", "7"), create)))
	require.Equal(t, int64(5), raised["allocator"])
}

// TestGuardedMethods tries every method of the service.
func TestGuardedMethods(t *testing.T) {
	f, _, _ := open(t, t.TempDir())
	require.NoError(t, f.Guard(call(t, rpc.RoleAllocator, "5"), create))
	name := func(method string) string { return "/" + agentv1.AgentService_ServiceDesc.ServiceName + "/" + method }
	var methods []string
	for _, m := range agentv1.AgentService_ServiceDesc.Methods {
		methods = append(methods, name(m.MethodName))
	}
	for _, m := range agentv1.AgentService_ServiceDesc.Streams {
		methods = append(methods, name(m.StreamName))
	}
	require.Len(t, methods, 10)
	for _, m := range methods {
		err := f.Guard(call(t, rpc.RoleAllocator, "4"), m)
		if m == agentv1.AgentService_WatchStatus_FullMethodName || m == agentv1.AgentService_StreamLogs_FullMethodName {
			require.NoError(t, err, m)
			continue
		}
		requireSuperseded(t, err, "5")
	}
}

func TestTermsAreDurable(t *testing.T) {
	path := t.TempDir()
	f, _, _ := open(t, path)
	require.NoError(t, f.Guard(call(t, rpc.RoleAllocator, "5"), create))
	require.NoError(t, f.Guard(call(t, rpc.RoleController, "7"), create))
	f, s, raised := open(t, path)
	require.Equal(t, map[string]int64{"allocator": 5, "controller": 7}, raised)
	requireSuperseded(t, f.Guard(call(t, rpc.RoleAllocator, "4"), create), "5")
	requireSuperseded(t, f.Guard(call(t, rpc.RoleController), create), "7")
	require.NoError(t, f.Guard(call(t, rpc.RoleAllocator, "5"), create))
	require.Zero(t, s.writes.Load())

	dir, err := state.Open(path)
	require.NoError(t, err)
	require.NoError(t, dir.Write("terms", []byte("{")))
	_, err = terms.Open(dir, func(string, int64) {})
	require.Error(t, err, "ignoring the file would let superseded leaders in")
}

func TestTermThatCannotBeWrittenIsNotInForce(t *testing.T) {
	f, s, raised := open(t, t.TempDir())
	require.NoError(t, f.Guard(call(t, rpc.RoleAllocator, "5"), create))
	s.broken.Store(true)
	err := f.Guard(call(t, rpc.RoleAllocator, "6"), create)
	require.True(t, errdefs.IsUnavailable(err), "%v", err)
	require.NoError(t, f.Guard(call(t, rpc.RoleAllocator, "5"), create))
	require.Equal(t, int64(5), raised["allocator"])
	s.broken.Store(false)
	require.NoError(t, f.Guard(call(t, rpc.RoleAllocator, "6"), create))
	requireSuperseded(t, f.Guard(call(t, rpc.RoleAllocator, "5"), create), "6")
}

// TestRaisedIsCalledBeforeCallsPass is the guarantee that Supersede relies on.
func TestRaisedIsCalledBeforeCallsPass(t *testing.T) {
	dir, err := state.Open(t.TempDir())
	require.NoError(t, err)
	var reported atomic.Int64
	f, err := terms.Open(dir, func(_ string, term int64) { reported.Store(term) })
	require.NoError(t, err)
	var wg sync.WaitGroup
	for term := range int64(20) {
		for range 4 {
			ctx := call(t, rpc.RoleAllocator, strconv.FormatInt(term, 10))
			wg.Go(func() {
				if err := f.Guard(ctx, create); err == nil && reported.Load() < term {
					t.Errorf("a call of term %d passed when the latest reported term was %d", term, reported.Load())
				}
			})
		}
	}
	wg.Wait()
	require.Equal(t, int64(19), reported.Load())
}
