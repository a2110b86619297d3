package tunnel_test

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/gorilla/websocket"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/tunnel"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func TestMain(m *testing.M) {
	// spdystream needs another second for a connection that the peer closed first.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("github.com/moby/spdystream.(*Connection).shutdown"))
}

// apiserver is an API server with a kubelet. The Pod `echo` sends back what it receives. On the port of the Pod `closed` no
// process listens.
type apiserver struct {
	*httptest.Server

	pods []corev1.Pod
	// refuse maps a request's method to the status that it gets.
	refuse map[string]int
	asked  chan string // field selectors of lists
	ways   sync.Map    // HTTP methods of the tunnels
	links  sync.WaitGroup
}

func newAPIServer(t *testing.T) *apiserver {
	t.Helper()
	s := &apiserver{asked: make(chan string, 10), refuse: map[string]int{}}
	s.Server = httptest.NewServer(http.HandlerFunc(s.serve))
	t.Cleanup(func() { s.links.Wait(); s.Close() })
	return s
}

func (s *apiserver) cluster(t *testing.T) *tunnel.Cluster {
	t.Helper()
	c, err := tunnel.New(&rest.Config{Host: s.URL})
	require.NoError(t, err)
	return c
}

func (s *apiserver) serve(w http.ResponseWriter, r *http.Request) {
	const prefix = "/api/v1/namespaces/system/pods"
	switch {
	case r.URL.Path == prefix:
		s.asked <- r.URL.Query().Get("labelSelector") + " " + r.URL.Query().Get("fieldSelector")
		if s.refused(w, "LIST") {
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}, Items: s.pods})
	case s.refused(w, r.Method):
	default:
		s.ways.Store(r.Method, true)
		s.links.Add(1)
		defer s.links.Done()
		s.forward(w, r, strings.TrimSuffix(strings.TrimPrefix(r.URL.Path, prefix+"/"), "/portforward"))
	}
}

func (s *apiserver) refused(w http.ResponseWriter, method string) bool {
	code, ok := s.refuse[method]
	if !ok {
		return false
	}
	reason := map[int]metav1.StatusReason{403: metav1.StatusReasonForbidden, 404: metav1.StatusReasonNotFound, 401: metav1.StatusReasonUnauthorized}[code]
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure, Code: int32(code), Reason: reason, Message: "not allowed, it is forbidden",
	})
	return true
}

// forward serves one tunnel.
func (s *apiserver) forward(w http.ResponseWriter, r *http.Request, pod string) {
	streams := make(chan httpstream.Stream, 2)
	take := func(stream httpstream.Stream, _ <-chan struct{}) error { streams <- stream; return nil }
	var link httpstream.Connection
	if r.Method == http.MethodGet {
		upgrader := websocket.Upgrader{Subprotocols: []string{"SPDY/3.1+" + portforward.PortForwardProtocolV1Name}}
		conn, err := upgrader.Upgrade(w, r, nil)
		if err != nil {
			return
		}
		if link, err = spdy.NewServerConnection(portforward.NewTunnelingConnection("server", conn), take); err != nil {
			return
		}
	} else {
		if _, err := httpstream.Handshake(r, w, []string{portforward.PortForwardProtocolV1Name}); err != nil {
			return
		}
		if link = spdy.NewResponseUpgrader().UpgradeResponse(w, r, take); link == nil {
			return
		}
	}
	defer func() { _ = link.Close() }()
	failures, data := <-streams, <-streams
	if failures.Headers().Get(corev1.StreamType) != corev1.StreamTypeError || data.Headers().Get(corev1.PortHeader) != "9090" {
		return
	}
	if pod == "closed" {
		_, _ = io.WriteString(failures, "connection refused on 9090")
	} else {
		_, _ = io.Copy(data, data)
	}
	_ = failures.Close()
	_ = data.Close()
	<-link.CloseChan()
}

func pod(name, node string, ready corev1.ConditionStatus) corev1.Pod {
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "system", Name: name},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Ports: []corev1.ContainerPort{
			{Name: "grpc", ContainerPort: 9090}, {Name: "metrics", ContainerPort: 9091}}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}},
	}
}

func TestPods(t *testing.T) {
	s := newAPIServer(t)
	leaving := pod("leaving", "node-0", corev1.ConditionTrue)
	leaving.DeletionTimestamp = &metav1.Time{Time: metav1.Now().Time}
	s.pods = []corev1.Pod{pod("z", "node-1", corev1.ConditionTrue), pod("b", "node-2", corev1.ConditionFalse), pod("a", "node-1", corev1.ConditionTrue), leaving}
	got, err := s.cluster(t).Pods(t.Context(), tunnel.Selector{Namespace: "system", Labels: "app=x", Node: "node-1"})
	require.NoError(t, err)
	ports := map[string]int32{"grpc": 9090, "metrics": 9091}
	require.Equal(t, []tunnel.Pod{
		{Namespace: "system", Name: "a", Node: "node-1", Ports: ports, Ready: true},
		{Namespace: "system", Name: "z", Node: "node-1", Ports: ports, Ready: true},
		{Namespace: "system", Name: "b", Node: "node-2", Ports: ports},
	}, got)
	require.Equal(t, "app=x status.phase=Running,spec.nodeName=node-1", <-s.asked)
	_, err = s.cluster(t).Pods(t.Context(), tunnel.Selector{Namespace: "system"})
	require.NoError(t, err)
	require.Equal(t, " status.phase=Running", <-s.asked)
}

func TestDial(t *testing.T) {
	for name, tc := range map[string]struct {
		refuse map[string]int
		way    string
	}{
		"WebSocket":                      {nil, http.MethodGet},
		"SPDY, without WebSockets":       {map[string]int{http.MethodGet: 400}, http.MethodPost},
		"SPDY, because get is forbidden": {map[string]int{http.MethodGet: 403}, http.MethodPost},
	} {
		t.Run(name, func(t *testing.T) {
			s := newAPIServer(t)
			s.refuse = tc.refuse
			dialing, dialed := context.WithCancel(t.Context())
			conn, err := s.cluster(t).Dial(dialing, tunnel.Pod{Namespace: "system", Name: "echo"}, 9090)
			require.NoError(t, err)
			dialed() // the connection outlives the context of Dial
			sent := strings.Repeat("some bytes to send ", 10_000)
			wrote := make(chan error, 1)
			go func() { _, err := io.WriteString(conn, sent); wrote <- err }()
			received := make([]byte, len(sent))
			_, err = io.ReadFull(conn, received)
			require.NoError(t, err)
			require.NoError(t, <-wrote)
			require.Equal(t, sent, string(received))
			require.Equal(t, "system/echo:9090", conn.RemoteAddr().String())
			_, used := s.ways.Load(tc.way)
			require.True(t, used)

			read := make(chan error, 1)
			go func() { _, err := conn.Read(received); read <- err }()
			require.NoError(t, conn.Close())
			require.Error(t, <-read, "Close ends a Read")
		})
	}
}

func TestClosedPort(t *testing.T) {
	s := newAPIServer(t)
	conn, err := s.cluster(t).Dial(t.Context(), tunnel.Pod{Namespace: "system", Name: "closed"}, 9090)
	require.NoError(t, err)
	_, err = conn.Read(make([]byte, 1))
	require.True(t, errdefs.IsUnavailable(err), "%v", err)
	require.Equal(t, tunnel.ReasonPod, fault.ReasonOf(err))
	require.ErrorContains(t, err, "system/closed:9090: connection refused on 9090")
	require.NoError(t, conn.Close())
}

func TestRefusals(t *testing.T) {
	both := func(code int) map[string]int {
		return map[string]int{http.MethodGet: code, http.MethodPost: code, "LIST": code}
	}
	for name, tc := range map[string]struct {
		code int
		list func(error) bool
		dial func(error) bool
	}{
		"unauthorized": {401, errdefs.IsUnauthorized, errdefs.IsUnauthorized},
		"forbidden":    {403, errdefs.IsPermissionDenied, errdefs.IsPermissionDenied},
		"not found":    {404, errdefs.IsNotFound, errdefs.IsNotFound},
		"broken":       {500, errdefs.IsUnavailable, errdefs.IsUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			s := newAPIServer(t)
			s.refuse = both(tc.code)
			_, err := s.cluster(t).Pods(t.Context(), tunnel.Selector{Namespace: "system"})
			require.True(t, tc.list(err), "%v", err)
			require.ErrorContains(t, err, "not allowed")
			_, err = s.cluster(t).Dial(t.Context(), tunnel.Pod{Namespace: "system", Name: "echo"}, 9090)
			require.True(t, tc.dial(err), "%v", err)
			require.ErrorContains(t, err, "not allowed")
			require.Equal(t, tunnel.ReasonCluster, fault.ReasonOf(err))
		})
	}
}

func TestNoAPIServer(t *testing.T) {
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	c, err := tunnel.New(&rest.Config{Host: "http://" + l.Addr().String()})
	require.NoError(t, err)
	_, err = c.Pods(t.Context(), tunnel.Selector{Namespace: "system"})
	require.True(t, errdefs.IsUnavailable(err), "%v", err)
	require.ErrorContains(t, err, "listing Pods: the API server at "+l.Addr().String())
	_, err = c.Dial(t.Context(), tunnel.Pod{Namespace: "system", Name: "echo"}, 9090)
	require.True(t, errdefs.IsUnavailable(err), "%v", err)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = c.Pods(ended, tunnel.Selector{Namespace: "system"})
	require.ErrorIs(t, err, context.Canceled)
}

func TestOpen(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "kubeconfig")
	require.NoError(t, os.WriteFile(file, []byte(`
apiVersion: v1
kind: Config
current-context: one
contexts: [{name: one, context: {cluster: one}}, {name: two, context: {cluster: nowhere}}]
clusters: [{name: one, cluster: {server: "http://127.0.0.1:1"}}]
`), 0o600))
	env := func(value string) func(string) string {
		return func(name string) string {
			if name == "KUBECONFIG" {
				return value
			}
			return ""
		}
	}
	for name, o := range map[string]tunnel.Options{
		"named":            {Kubeconfig: file, Getenv: env("/nowhere")},
		"environment":      {Getenv: env(file)},
		"environment list": {Getenv: env("/nowhere" + string(filepath.ListSeparator) + file)},
		"context":          {Kubeconfig: file, Context: "one", Getenv: env("")},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := tunnel.Open(o)
			require.NoError(t, err)
		})
	}
	for name, o := range map[string]tunnel.Options{
		"no such file":       {Kubeconfig: filepath.Join(dir, "none"), Getenv: env(file)},
		"no such context":    {Kubeconfig: file, Context: "three", Getenv: env("")},
		"no such cluster":    {Kubeconfig: file, Context: "two", Getenv: env("")},
		"nothing configured": {Getenv: env("/nowhere")},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := tunnel.Open(o)
			require.True(t, errdefs.IsFailedPrecondition(err), "%v", err)
			require.Equal(t, tunnel.ReasonNoCluster, fault.ReasonOf(err))
		})
	}
}
