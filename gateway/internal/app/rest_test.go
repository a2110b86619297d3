package app_test

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

func requireJSON(t *testing.T, want string, a answer) {
	t.Helper()
	require.Equal(t, http.StatusOK, a.code, a.body)
	require.Equal(t, "application/json", a.header.Get("Content-Type"))
	require.JSONEq(t, want, a.body)
}

func TestCreate(t *testing.T) {
	var got *sandboxv1.CreateSandboxRequest
	g := start(t, &fake{create: func(_ context.Context, in *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
		got = in
		return &sandboxv1.CreateSandboxResponse{
			Sandbox: &sandboxv1.Sandbox{Namespace: in.GetNamespace(), Name: "a", Status: &sandboxv1.SandboxStatus{Phase: sandboxv1.Phase_PHASE_RUNNING}},
			Timings: []*sandboxv1.StageTiming{{Stage: "reserve", Duration: durationpb.New(1500 * time.Microsecond)}},
		}, nil
	}})
	const body = `{"name":"a","spec":{"image":"x","pool":"p","workingDir":"/w","network":"NETWORK_MODE_NONE","resources":{"cpuMillis":"500"}},"labels":{"k":"v"}}`
	const want = `{"sandbox":{"namespace":"ns1","name":"a","status":{"phase":"PHASE_RUNNING"}},"timings":[{"stage":"reserve","duration":"0.001500s"}]}`

	requireJSON(t, want, g.do(t, "POST", collection, body, "Idempotency-Key", "key-1"))
	require.Empty(t, cmp.Diff(&sandboxv1.CreateSandboxRequest{
		Namespace: "ns1", Name: "a", Labels: map[string]string{"k": "v"}, RequestId: "key-1",
		Spec: &sandboxv1.SandboxSpec{
			Image: "x", Pool: "p", WorkingDir: "/w", Network: sandboxv1.NetworkMode_NETWORK_MODE_NONE,
			Resources: &sandboxv1.ResourceLimits{CpuMillis: 500},
		},
	}, got, protocmp.Transform()))

	t.Run("proto field names", func(t *testing.T) {
		requireJSON(t, want, g.do(t, "POST", collection, `{"spec":{"image":"x","pool":"p","working_dir":"/w"},"request_id":"r"}`))
		require.Equal(t, "/w", got.GetSpec().GetWorkingDir())
		require.Equal(t, "r", got.GetRequestId())
	})
	t.Run("the same key in body and header", func(t *testing.T) {
		requireJSON(t, want, g.do(t, "POST", collection, `{"spec":{"image":"x","pool":"p"},"requestId":"r"}`, "Idempotency-Key", "r"))
	})
	t.Run("different keys", func(t *testing.T) {
		a := g.do(t, "POST", collection, `{"spec":{"image":"x","pool":"p"},"requestId":"r"}`, "Idempotency-Key", "s")
		require.Equal(t, http.StatusBadRequest, a.code)
		require.Equal(t, "request_id", a.failure(t).Details[0].Metadata["field"])
	})
	t.Run("curl's default content type", func(t *testing.T) {
		requireJSON(t, want, g.do(t, "POST", collection, body, "Content-Type", "application/x-www-form-urlencoded"))
	})
}

func TestReadDeleteUpdateList(t *testing.T) {
	var deleted *sandboxv1.DeleteSandboxRequest
	var updated *sandboxv1.UpdateSandboxRequest
	var listed *sandboxv1.ListSandboxesRequest
	some := &sandboxv1.Sandbox{Namespace: "ns1", Name: "a"}
	g := start(t, &fake{
		get: func(_ context.Context, in *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
			return &sandboxv1.GetSandboxResponse{Sandbox: &sandboxv1.Sandbox{Namespace: in.GetNamespace(), Name: in.GetName()}}, nil
		},
		remove: func(_ context.Context, in *sandboxv1.DeleteSandboxRequest) (*sandboxv1.DeleteSandboxResponse, error) {
			deleted = in
			return &sandboxv1.DeleteSandboxResponse{Sandbox: some}, nil
		},
		update: func(_ context.Context, in *sandboxv1.UpdateSandboxRequest) (*sandboxv1.UpdateSandboxResponse, error) {
			updated = in
			return &sandboxv1.UpdateSandboxResponse{Sandbox: some}, nil
		},
		list: func(_ context.Context, in *sandboxv1.ListSandboxesRequest) (*sandboxv1.ListSandboxesResponse, error) {
			listed = in
			return &sandboxv1.ListSandboxesResponse{}, nil
		},
	})
	one := `{"sandbox":{"namespace":"ns1","name":"a"}}`
	requireJSON(t, one, g.do(t, "GET", collection+"/a", ""))

	requireJSON(t, one, g.do(t, "DELETE", collection+"/a?gracePeriod=1.5s&uid=u", "", "X-Request-Id", "req-7"))
	require.Empty(t, cmp.Diff(&sandboxv1.DeleteSandboxRequest{
		Namespace: "ns1", Name: "a", Uid: "u", GracePeriod: durationpb.New(1500 * time.Millisecond), RequestId: "req-7",
	}, deleted, protocmp.Transform()))

	requireJSON(t, one, g.do(t, "PATCH", collection+"/a", `{"spec":{"expireTime":"2030-01-02T03:04:05Z","failurePolicy":"FAILURE_POLICY_MANUAL"},"labels":{"k":"v"}}`, "X-Request-Id", "req-8"))
	require.Empty(t, cmp.Diff(&sandboxv1.UpdateSandboxRequest{
		Sandbox: &sandboxv1.Sandbox{Namespace: "ns1", Name: "a", Labels: map[string]string{"k": "v"}, Spec: &sandboxv1.SandboxSpec{
			ExpireTime:    timestamppb.New(time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)),
			FailurePolicy: sandboxv1.FailurePolicy_FAILURE_POLICY_MANUAL,
		}},
		UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"labels", "spec.expire_time", "spec.failure_policy"}}, RequestId: "req-8",
	}, updated, protocmp.Transform()))
	requireJSON(t, one, g.do(t, "PATCH", collection+"/a", `{"spec":{"expireTime":null}}`))
	require.Equal(t, []string{"spec.expire_time"}, updated.GetUpdateMask().GetPaths(), "null clears")
	require.Nil(t, updated.GetSandbox().GetSpec().GetExpireTime())
	requireJSON(t, one, g.do(t, "PATCH", collection+"/a?updateMask=spec.expireTime", `{}`))
	require.Equal(t, []string{"spec.expire_time"}, updated.GetUpdateMask().GetPaths())

	requireJSON(t, `{"sandboxes":[]}`, g.do(t, "GET", collection+"?phases=PHASE_RUNNING&phases=PHASE_FAILED&labelSelector=a%3Db&page_size=7&pool=p", ""))
	require.Empty(t, cmp.Diff(&sandboxv1.ListSandboxesRequest{
		Namespace: "ns1", Pool: "p", LabelSelector: "a=b", PageSize: 7,
		Phases: []sandboxv1.Phase{sandboxv1.Phase_PHASE_RUNNING, sandboxv1.Phase_PHASE_FAILED},
	}, listed, protocmp.Transform()))
	requireJSON(t, `{"sandboxes":[]}`, g.do(t, "GET", "/v1/sandboxes", ""))
	require.Empty(t, listed.GetNamespace())
}

func TestHeaders(t *testing.T) {
	var md metadata.MD
	g := start(t, &fake{get: func(ctx context.Context, _ *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
		md, _ = metadata.FromIncomingContext(ctx)
		return &sandboxv1.GetSandboxResponse{}, nil
	}})
	const trace = "4bf92f3577b34da6a3ce929d0e0e4736"
	a := g.do(t, "GET", collection+"/a", "", "X-Request-Id", "mine", "Traceparent", "00-"+trace+"-00f067aa0ba902b7-01",
		"Grpc-Metadata-Role", "admin", "Cookie", "c=secret")
	require.Equal(t, http.StatusOK, a.code)
	require.Equal(t, 2, a.proto, "HTTP/2 is on")
	require.Equal(t, "mine", a.header.Get("X-Request-Id"))
	require.Equal(t, "nosniff", a.header.Get("X-Content-Type-Options"))
	require.Len(t, md.Get("traceparent"), 1)
	require.Contains(t, md.Get("traceparent")[0], trace, "one trace runs through")
	for _, key := range []string{"authorization", "role", "grpcgateway-cookie", "cookie"} {
		require.Empty(t, md.Get(key), key)
	}
	for key := range a.header {
		require.NotContains(t, key, "Grpc-")
	}
	t.Run("invalid request id", func(t *testing.T) {
		a := g.do(t, "GET", collection+"/a", "", "X-Request-Id", "two words")
		require.Len(t, a.header.Get("X-Request-Id"), 36)
	})
}

func TestDocument(t *testing.T) {
	g := start(t, &fake{})
	a := g.do(t, "GET", "/openapi.json", "")
	want, err := os.ReadFile(filepath.Join("..", "..", "..", "gen", "openapi", "fastsandbox.openapi.json"))
	require.NoError(t, err)
	require.Equal(t, string(want), a.body)
	var document struct {
		OpenAPI string
		Paths   map[string]map[string]any
	}
	require.NoError(t, json.Unmarshal([]byte(a.body), &document))
	require.Equal(t, "3.1.0", document.OpenAPI)
	for path := range document.Paths {
		require.Regexp(t, `^/v1/`, path)
	}
	for path, methods := range map[string][]string{
		"/v1/namespaces/{namespace}/sandboxes":                {"get", "post"},
		"/v1/namespaces/{namespace}/sandboxes/{name}":         {"delete", "get", "patch"},
		"/v1/namespaces/{namespace}/pools/{pool}/images:pull": {"post"},
		"/v1/agents":             {"get"},
		"/v1/gc/objects:explain": {"get"},
		"/v1/gc/graph":           {"get"},
	} {
		require.ElementsMatch(t, methods, slices.Collect(maps.Keys(document.Paths[path])), path)
	}

	a = g.do(t, "GET", "/openapi.yaml", "")
	require.Equal(t, "application/yaml", a.header.Get("Content-Type"))
	require.Contains(t, a.body, "openapi: 3.1.0\n")
}

func TestGarbageCollector(t *testing.T) {
	g := start(t, &fake{})
	requireJSON(t, `{"state":"STATE_OWNED"}`, g.do(t, "GET", "/v1/gc/objects/u:explain", ""))
}
