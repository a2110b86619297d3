package attack_test

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// childVariable makes the test's binary print the descriptors that it was started with.
const childVariable = "ATTACK_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) != "" {
		o := attack.Inherited().Run(&attack.Env{})
		_, _ = os.Stdout.WriteString(o.Evidence)
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// TestTable: every attack says what it does, and has a name of its own, by which the program finds it.
func TestTable(t *testing.T) {
	names := map[string]bool{}
	for _, a := range attack.All() {
		require.False(t, names[a.Name], "%s is there twice", a.Name)
		names[a.Name] = true
		require.NotEmpty(t, a.Does, a.Name)
		require.NotEmpty(t, a.Success, a.Name)
		require.Contains(t, []string{"", suite.Network}, a.Expected, a.Name)
		found, err := attack.Named(a.Name)
		require.NoError(t, err)
		require.Equal(t, a.Does, found.Does)
	}
	require.Greater(t, len(names), 70)
	_, err := attack.Named("nothing")
	require.Error(t, err)
}

func TestFor(t *testing.T) {
	has := func(user attack.User, first bool, name string) bool {
		for _, a := range attack.For(user, first) {
			if a.Name == name {
				return true
			}
		}
		return false
	}
	require.True(t, has(attack.Root, false, "mount: bind"))
	require.True(t, has(attack.Mere, false, "mount: bind"))
	require.True(t, has(attack.Mere, false, "privileges: setuid program"))
	require.False(t, has(attack.Root, true, "privileges: setuid program"), "only an ordinary user gains by it")
	require.True(t, has(attack.Root, true, "ports: reach the kubelet"))
	require.False(t, has(attack.Root, false, "ports: reach the kubelet"), "once is enough")
}

func TestEnv(t *testing.T) {
	e := &attack.Env{Canary: "/c", Secret: "s", Agent: "1.2.3.4:5"}
	parsed, err := attack.ParseEnv(e.String())
	require.NoError(t, err)
	require.Equal(t, e, parsed)
	parsed, err = attack.ParseEnv("")
	require.NoError(t, err)
	require.Equal(t, &attack.Env{}, parsed)
	_, err = attack.ParseEnv("x")
	require.Error(t, err)
}

// try makes an attack.
func try(t *testing.T, e *attack.Env, name string) suite.Outcome {
	t.Helper()
	a, err := attack.Named(name)
	require.NoError(t, err)
	o := a.Run(e)
	require.Equal(t, name, o.Name)
	return o
}

func grpcServer(t *testing.T, options ...grpc.ServerOption) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := grpc.NewServer(options...)
	healthv1.RegisterHealthServer(s, health.NewServer())
	sandboxv1.RegisterSandboxServiceServer(s, open{})
	reflection.Register(s)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); require.NoError(t, <-done) })
	return l.Addr().String()
}

// open answers everybody.
type open struct {
	sandboxv1.UnimplementedSandboxServiceServer
}

func (open) ListSandboxes(context.Context, *sandboxv1.ListSandboxesRequest) (*sandboxv1.ListSandboxesResponse, error) {
	return &sandboxv1.ListSandboxesResponse{}, nil
}

func withTLS(t *testing.T, auth tls.ClientAuthType) grpc.ServerOption {
	t.Helper()
	own, err := attack.SelfSigned("allocator")
	require.NoError(t, err)
	return grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{own}, ClientAuth: auth, MinVersion: tls.VersionTLS13}))
}

// TestAnswersAreNoticed: an open port is a success, and one that asks for credentials is not.
func TestAnswersAreNoticed(t *testing.T) {
	refuse := grpc.ChainUnaryInterceptor(func(context.Context, any, *grpc.UnaryServerInfo, grpc.UnaryHandler) (any, error) {
		return nil, status.Error(codes.Unauthenticated, "no")
	})
	openPort, refusing := grpcServer(t, withTLS(t, tls.NoClientCert)), grpcServer(t, withTLS(t, tls.RequestClientCert), refuse)
	// Any certificate is accepted: the attack must present its own.
	mine, strict := grpcServer(t, withTLS(t, tls.RequireAnyClientCert)), grpcServer(t, withTLS(t, tls.RequireAndVerifyClientCert))
	plain := grpcServer(t)
	site := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/v1") {
			w.WriteHeader(http.StatusForbidden)
		}
	}))
	defer site.Close()
	host := site.Listener.Addr().String()
	for _, c := range []struct {
		attack    string
		env       attack.Env
		succeeded bool
	}{
		{"ports: answer of allocator", attack.Env{Allocator: openPort}, true},
		{"ports: answer of allocator", attack.Env{Allocator: mine}, true},
		{"ports: answer of allocator", attack.Env{Allocator: refusing}, false},
		{"ports: answer of allocator", attack.Env{Allocator: strict}, false},
		{"ports: answer of reflection of the allocator", attack.Env{Allocator: openPort}, true},
		{"ports: answer of reflection of the allocator", attack.Env{Allocator: strict}, false},
		{"ports: answer of agent", attack.Env{Agent: openPort}, false}, // it has no such service
		{"ports: answer of health of the agent", attack.Env{Health: plain}, true},
		{"ports: answer of health of the agent", attack.Env{Health: openPort}, false},
		{"ports: answer of kubelet", attack.Env{Kubelet: host}, true},
		{"ports: answer of gateway", attack.Env{Gateway: host}, false},
		{"ports: reach the kubelet", attack.Env{Kubelet: host}, true},
		{"ports: reach the kubelet", attack.Env{Kubelet: "127.0.0.1:1"}, false},
	} {
		o := try(t, &c.env, c.attack)
		require.Equal(t, c.succeeded, o.Evidence != "", "%+v: %+v", c.env, o)
		require.Empty(t, o.Broken)
	}
	require.NotEmpty(t, try(t, &attack.Env{}, "ports: reach the kubelet").Broken, "without an address nothing is proved")
}

// TestCanaryIsNoticed: a path to the canary is a success, and the same path to another file is not.
func TestCanaryIsNoticed(t *testing.T) {
	e := &attack.Env{Canary: filepath.Join(t.TempDir(), "canary"), Secret: "secret"}
	require.NoError(t, os.WriteFile(e.Canary, []byte(e.Secret), 0o600))
	require.NotEmpty(t, try(t, e, "descriptors: working directory").Evidence)
	require.NotEmpty(t, attack.Read(e, []string{"/nowhere", e.Canary}).Evidence)
	require.NoError(t, os.WriteFile(e.Canary, []byte("other"), 0o600))
	require.Empty(t, try(t, e, "descriptors: working directory").Evidence)
	require.Empty(t, attack.Read(e, []string{e.Canary}).Evidence)
	require.NotEmpty(t, attack.Read(&attack.Env{}, []string{e.Canary}).Broken)
}

// TestAbstractSocketIsNoticed: the socket of a roommate is one thing, any other one another.
func TestAbstractSocketIsNoticed(t *testing.T) {
	l, err := net.Listen("unix", "@attack-test")
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte("secret"))
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() { <-done })
	require.NotEmpty(t, try(t, &attack.Env{}, "sockets: abstract sockets of the node").Evidence)
	require.NotEmpty(t, try(t, &attack.Env{Abstract: "attack-test", Secret: "secret"}, "sockets: abstract socket of a roommate").Evidence)
	require.Empty(t, try(t, &attack.Env{Abstract: "attack-test", Secret: "other"}, "sockets: abstract socket of a roommate").Evidence)
}

// TestInheritedDescriptorsAreNoticed starts a process with a directory, and one with nothing.
func TestInheritedDescriptorsAreNoticed(t *testing.T) {
	dir, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer func() { require.NoError(t, dir.Close()) }()
	for _, files := range [][]*os.File{nil, {dir}} {
		self, err := os.Executable()
		require.NoError(t, err)
		cmd := exec.CommandContext(t.Context(), self)
		cmd.Env, cmd.ExtraFiles = append(os.Environ(), childVariable+"=1"), files
		out, err := cmd.Output()
		require.NoError(t, err)
		require.Equal(t, len(files) > 0, strings.Contains(string(out), dir.Name()), "%s", out)
	}
}

// TestOrdinaryProcess: this process has no filter, and sees others; both are noticed.
func TestOrdinaryProcess(t *testing.T) {
	require.NotEmpty(t, try(t, &attack.Env{}, "processes: see").Evidence)
	require.NotEmpty(t, try(t, &attack.Env{}, "processes: signal").Evidence)
	require.NotEmpty(t, try(t, &attack.Env{}, "privileges: seccomp").Evidence)
}
