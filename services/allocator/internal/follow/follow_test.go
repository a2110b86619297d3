package follow_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/follow"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// server is an API server with sandboxes.
type server struct {
	mu        sync.Mutex
	sandboxes map[string]*v1alpha1.Sandbox
	version   string
	lists     int
	broken    bool                   // the next list ends early
	events    chan metav1.WatchEvent // of the watch that is open
}

func newServer(names ...string) *server {
	s := &server{sandboxes: map[string]*v1alpha1.Sandbox{}, version: "10", events: make(chan metav1.WatchEvent)}
	for _, name := range names {
		s.sandboxes[name] = sandbox(name, "1")
	}
	return s
}

func sandbox(name, version string) *v1alpha1.Sandbox {
	return &v1alpha1.Sandbox{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "Sandbox"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: name, UID: types.UID("uid-" + name), ResourceVersion: version,
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "m"}},
		},
	}
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Get("watch") != "" {
		s.watch(w, r)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lists++
	limited := r.URL.Query().Get("limit") != ""
	list := &v1alpha1.SandboxList{ListMeta: metav1.ListMeta{ResourceVersion: s.version}}
	var names []string
	for name := range s.sandboxes {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if limited && name <= r.URL.Query().Get("continue") {
			continue
		}
		if limited && len(list.Items) == 2 {
			list.Continue = list.Items[1].Name
			break
		}
		list.Items = append(list.Items, *s.sandboxes[name])
	}
	raw, err := json.Marshal(list)
	if err != nil {
		panic(err)
	}
	if s.broken {
		s.broken = false
		raw = raw[:len(raw)*2/3]
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(raw)
}

func (s *server) watch(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.(http.Flusher).Flush()
	for {
		select {
		case e := <-s.events:
			_ = json.NewEncoder(w).Encode(e)
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

func (s *server) send(kind string, sb *v1alpha1.Sandbox) {
	raw, err := json.Marshal(sb)
	if err != nil {
		panic(err)
	}
	s.events <- metav1.WatchEvent{Type: kind, Object: apiruntime.RawExtension{Raw: raw}}
}

// expire ends the watches, whose resource version the server then no longer knows.
func (s *server) expire() {
	s.events <- metav1.WatchEvent{Type: "ERROR", Object: apiruntime.RawExtension{Raw: []byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410}`)}}
}

// sink is a follow.Sink that keeps all.
type sink struct {
	mu    sync.Mutex
	known map[types.UID]*v1alpha1.Sandbox
}

func (s *sink) Seen(sb *v1alpha1.Sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known[sb.UID] = sb
}

func (s *sink) Gone(sb *v1alpha1.Sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.known, sb.UID)
}

func (s *sink) Known(listed map[types.UID]struct{}, _ string) (missing []*v1alpha1.Sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for uid, sb := range s.known {
		if _, ok := listed[uid]; !ok {
			missing = append(missing, sb)
		}
	}
	return missing
}

// versions returns the names that are known, with their resource versions.
func (s *sink) versions() map[string]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[string]string{}
	for _, sb := range s.known {
		out[sb.Name] = sb.ResourceVersion
	}
	return out
}

func TestFollow(t *testing.T) {
	s := newServer("a", "b", "c")
	s.broken = true
	web := httptest.NewServer(s)
	defer web.Close()
	scheme := apiruntime.NewScheme()
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	known := &sink{known: map[types.UID]*v1alpha1.Sandbox{"uid-old": sandbox("old", "0")}}
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	f, err := follow.New(follow.Config{REST: &rest.Config{Host: web.URL}, HTTP: &http.Client{Transport: transport}, Scheme: scheme, Sink: known})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { f.Run(ctx) })
	defer running.Wait()
	defer cancel()

	<-f.Synced()
	require.Equal(t, 3, s.lists, "a list that ends early is repeated in pages")
	require.Equal(t, map[string]string{"a": "1", "b": "1", "c": "1"}, known.versions(), "what is not listed is gone")
	require.Empty(t, known.known["uid-a"].ManagedFields)

	becomes := func(want map[string]string) {
		t.Helper()
		require.Eventually(t, func() bool {
			got := known.versions()
			if len(got) != len(want) {
				return false
			}
			for name, version := range want {
				if got[name] != version {
					return false
				}
			}
			return true
		}, testkit.Timeout, testkit.Tick, "%v", known.versions())
	}
	s.send("ADDED", sandbox("d", "11"))
	s.send("MODIFIED", sandbox("a", "12"))
	s.send("DELETED", sandbox("b", "13"))
	becomes(map[string]string{"a": "12", "c": "1", "d": "11"})

	s.mu.Lock()
	s.version = "20"
	s.sandboxes = map[string]*v1alpha1.Sandbox{"a": sandbox("a", "14"), "e": sandbox("e", "15")}
	s.mu.Unlock()
	s.expire()
	becomes(map[string]string{"a": "14", "e": "15"})
}
