package rest_test

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	"k8s.io/utils/clock"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// send serves one request, and returns the calls that the allocator received for it.
func (h *harness) send(t *testing.T, method, path, query, body string) (*httptest.ResponseRecorder, []call) {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body))
	r.URL.RawQuery = query
	h.allocator.calls = nil
	w := httptest.NewRecorder()
	h.handler.ServeHTTP(w, r)
	return w, h.allocator.calls
}

// FuzzQuery lists with an arbitrary query. A query reaches the allocator only if each of its parameters is a field that is set once,
// and it never changes the namespace of the path. Otherwise the answer names the problem.
func FuzzQuery(f *testing.F) {
	for _, seed := range []string{
		"", "pool=p", "pageSize=3&page_size=4", "page_size=3", "pool=p&pool=q", "pageSize=many", "pool=%zz", "Pool=p", "namespace=other", "phases=PHASE_RUNNING&phases=2",
		"labelSelector=a%3Db&pageToken=x", "pool.name=p", "phases[]=1", "a;b", "pool=%ff",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, query string) {
		h := newHarness(t, clock.RealClock{})
		h.allocator.replies = []any{&sandboxv1.ListSandboxesResponse{}}
		w, calls := h.send(t, http.MethodGet, "/v1/namespaces/ns/sandboxes", query, "")
		if w.Code != http.StatusOK {
			require.Equal(t, http.StatusBadRequest, w.Code, w.Body)
			require.Empty(t, calls)
			require.NotEmpty(t, failureOf(t, w).Message)
			return
		}
		require.Len(t, calls, 1)
		request, ok := calls[0].request.(*sandboxv1.ListSandboxesRequest)
		require.True(t, ok)
		require.Equal(t, "ns", request.GetNamespace())
		_, err := proto.Marshal(request)
		require.NoError(t, err, "it can be sent")
		values, err := url.ParseQuery(query)
		require.NoError(t, err)
		fields := request.ProtoReflect().Descriptor().Fields()
		set := map[string]bool{}
		for key, list := range values {
			at := -1
			for i := range fields.Len() {
				if field := fields.Get(i); string(field.Name()) == key || field.JSONName() == key {
					at = i
				}
			}
			require.GreaterOrEqual(t, at, 0, "unknown field %q", key)
			name := string(fields.Get(at).Name())
			require.True(t, fields.Get(at).IsList() || len(list) == 1 && !set[name], "%q", key)
			set[name] = true
		}
	})
}

// FuzzMask updates with an arbitrary mask in the query. What the allocator receives are proto names; a path that is no field arrives as it
// is, for the allocator to refuse.
func FuzzMask(f *testing.F) {
	for _, seed := range []string{"labels", "spec.ttlAfterFinished", "labels,spec.expire_time", "spec.nonsense", "", ",", "spec..image", "labels.a", "spec.env.A", "spec.ports.x", "specEnv", "\xff"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, mask string) {
		h := newHarness(t, clock.RealClock{})
		h.allocator.replies = []any{&sandboxv1.UpdateSandboxResponse{}}
		w, calls := h.send(t, http.MethodPatch, "/v1/namespaces/ns/sandboxes/a", url.Values{"updateMask": {mask}}.Encode(), `{"labels":{"a":"b"}}`)
		if w.Code != http.StatusOK {
			require.Less(t, w.Code, 500, w.Body)
			require.Empty(t, calls)
			return
		}
		request, ok := calls[0].request.(*sandboxv1.UpdateSandboxRequest)
		require.True(t, ok)
		_, err := proto.Marshal(request)
		require.NoError(t, err, "it can be sent")
		got := request.GetUpdateMask().GetPaths()
		if mask == "" {
			return
		}
		given := strings.Split(mask, ",")
		require.Len(t, got, len(given))
		for i, path := range got {
			valid := (&fieldmaskpb.FieldMask{Paths: []string{path}}).IsValid(&sandboxv1.Sandbox{})
			if !valid {
				require.Equal(t, given[i], path, "unchanged")
				continue
			}
			// The two names of a field differ by case and underscores alone.
			plain := func(s string) string { return strings.ToLower(strings.ReplaceAll(s, "_", "")) }
			require.Equal(t, plain(given[i]), plain(path))
		}
	})
}

// FuzzBody creates with an arbitrary body. What is accepted is one JSON document of the message, in the namespace of the path.
func FuzzBody(f *testing.F) {
	for _, seed := range []string{
		"", "{}", `{"name":"a","spec":{"image":"busybox","env":{"A":"b"},"ports":[80]}}`, `{"namespace":"other"}`, "{}{}", "null", "[]", `{"spec":{"image":1}}`,
		`{"spec":{"expireTime":"2026-01-02T03:04:05Z"}}`, `{"name":"a","name":"b"}`, `{"\u0000":1}`, strings.Repeat(`{"spec":`, 300), "\xff",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, body string) {
		h := newHarness(t, clock.RealClock{})
		h.allocator.replies = []any{&sandboxv1.CreateSandboxResponse{}}
		w, calls := h.send(t, http.MethodPost, "/v1/namespaces/ns/sandboxes", "", body)
		if w.Code >= 300 {
			require.Less(t, w.Code, 500, w.Body)
			require.Empty(t, calls)
			require.NotEmpty(t, failureOf(t, w).Message)
			return
		}
		request, ok := calls[0].request.(*sandboxv1.CreateSandboxRequest)
		require.True(t, ok)
		require.Equal(t, "ns", request.GetNamespace())
		if strings.TrimSpace(body) != "" {
			require.NoError(t, protojson.Unmarshal([]byte(body), &sandboxv1.CreateSandboxRequest{}))
		}
	})
}
