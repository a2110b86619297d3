package follow_test

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

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
	lists     []string               // of which form
	refused   map[string]int         // lists of a form that are still answered with an error
	broken    map[string]int         // lists of a form that still end early
	events    chan metav1.WatchEvent // of the watch that is open
}

func newServer(names ...string) *server {
	s := &server{sandboxes: map[string]*v1alpha1.Sandbox{}, version: "10", events: make(chan metav1.WatchEvent), refused: map[string]int{}, broken: map[string]int{}}
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
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "m"}}, Labels: map[string]string{"name": name},
		},
		Spec: v1alpha1.SandboxSpec{Image: "image"},
	}
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Get("watch") != "" {
		s.watch(w, r)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	form := "objects"
	if strings.Contains(r.Header.Get("Accept"), "PartialObjectMetadataList") {
		form = "outlines"
	}
	limited := r.URL.Query().Get("limit") != ""
	if limited {
		form += " in pages"
	}
	s.lists = append(s.lists, form)
	if s.refused[form] > 0 {
		s.refused[form]--
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusGatewayTimeout)
		_, _ = w.Write([]byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Timeout","code":504}`))
		return
	}
	raw := s.page(limited, r.URL.Query().Get("continue"), strings.HasPrefix(form, "outlines"))
	if s.broken[form] > 0 {
		s.broken[form]--
		raw = raw[:len(raw)*2/3]
	}
	_, _ = w.Write(raw)
}

// page returns an answer to a list.
func (s *server) page(limited bool, from string, outlines bool) []byte {
	meta := metav1.ListMeta{ResourceVersion: s.version}
	var page []v1alpha1.Sandbox
	for _, name := range slices.Sorted(maps.Keys(s.sandboxes)) {
		if limited && name <= from {
			continue
		}
		if limited && len(page) == 2 {
			meta.Continue = page[1].Name
			break
		}
		page = append(page, *s.sandboxes[name])
	}
	if !outlines {
		raw, err := json.Marshal(&v1alpha1.SandboxList{ListMeta: meta, Items: page})
		if err != nil {
			panic(err)
		}
		return raw
	}
	list := &metav1.PartialObjectMetadataList{TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadataList"}, ListMeta: meta}
	for _, sb := range page {
		list.Items = append(list.Items, metav1.PartialObjectMetadata{TypeMeta: sb.TypeMeta, ObjectMeta: sb.ObjectMeta})
	}
	raw := &bytes.Buffer{}
	if err := protobuf.NewSerializer(nil, nil).Encode(list, raw); err != nil {
		panic(err)
	}
	return raw.Bytes()
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

func (s *sink) Outlined(sb *v1alpha1.Sandbox) { s.Seen(sb) }

func (s *sink) Filled(sb *v1alpha1.Sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known := s.known[sb.UID]; known != nil && known.Spec.Image == "" {
		s.known[sb.UID] = sb
	}
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

// run follows what a server has, until the test ends. What is done before whole objects are read is done by before.
func run(t *testing.T, s *server, before func(f *follow.Follower, known *sink)) *sink {
	t.Helper()
	web := httptest.NewServer(s)
	t.Cleanup(web.Close)
	scheme := apiruntime.NewScheme()
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	known := &sink{known: map[types.UID]*v1alpha1.Sandbox{"uid-old": sandbox("old", "0")}}
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	fill := make(chan struct{})
	f, err := follow.New(follow.Config{
		REST: &rest.Config{Host: web.URL}, HTTP: &http.Client{Transport: transport}, Scheme: scheme, Sink: known, Clock: clock.RealClock{}, Fill: fill,
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { f.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	<-f.Synced()
	before(f, known)
	close(fill)
	<-f.Filled()
	return known
}

// becomes waits until the names that are known, with their resource versions, are these.
func (s *sink) becomes(t *testing.T, want map[string]string) {
	t.Helper()
	require.Eventually(t, func() bool { return maps.Equal(want, s.versions()) }, testkit.Timeout, testkit.Tick, "%v", s.versions())
}

func TestFollow(t *testing.T) {
	s := newServer("a", "b", "c")
	known := run(t, s, func(f *follow.Follower, known *sink) {
		require.Equal(t, map[string]string{"a": "1", "b": "1", "c": "1"}, known.versions(), "what is not listed is gone")
		outline := known.known["uid-a"]
		require.Equal(t, "ns", outline.Namespace)
		require.Equal(t, map[string]string{"name": "a"}, outline.Labels)
		require.Empty(t, outline.ManagedFields)
		require.Empty(t, outline.Spec.Image, "only metadata are read at first")
		select {
		case <-f.Filled():
			require.Fail(t, "nothing is filled")
		default:
		}
		s.send("ADDED", sandbox("d", "11"))
		s.send("MODIFIED", sandbox("a", "12"))
		s.send("DELETED", sandbox("b", "13"))
		known.becomes(t, map[string]string{"a": "12", "c": "1", "d": "11"})
	})
	require.Equal(t, []string{"outlines", "objects"}, s.lists)
	known.becomes(t, map[string]string{"a": "12", "c": "1", "d": "11"})
	require.Equal(t, "image", known.known["uid-c"].Spec.Image)
	require.Empty(t, known.known["uid-c"].ManagedFields)

	s.mu.Lock()
	s.version = "20"
	s.sandboxes = map[string]*v1alpha1.Sandbox{"a": sandbox("a", "14"), "e": sandbox("e", "15")}
	s.mu.Unlock()
	s.expire()
	known.becomes(t, map[string]string{"a": "14", "e": "15"})
	require.Equal(t, "image", known.known["uid-e"].Spec.Image, "later lists are whole")
}

// TestPages: a list that the API server cannot make in time is made in pages, and one that fails is made again.
func TestPages(t *testing.T) {
	for name, fail := range map[string]func(*server) map[string]int{
		"it ends early":          func(s *server) map[string]int { return s.broken },
		"the server has no time": func(s *server) map[string]int { return s.refused },
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer("a", "b", "c")
			failing := fail(s)
			failing["outlines"], failing["objects"], failing["objects in pages"] = 1, 2, 1
			known := run(t, s, func(_ *follow.Follower, known *sink) { require.Len(t, known.versions(), 3) })
			require.Equal(t, []string{
				"outlines", "outlines in pages", "outlines in pages", "objects", "objects in pages", "objects", "objects in pages", "objects in pages",
			}, s.lists)
			require.Equal(t, "image", known.known["uid-c"].Spec.Image)
		})
	}
}
