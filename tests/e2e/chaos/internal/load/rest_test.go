package load_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/load"
)

// gateway answers every request with the same status line and body, and records the requests.
func gateway(t *testing.T, code int, body string) (*load.REST, *[]string) {
	t.Helper()
	var got []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		raw, _ := io.ReadAll(r.Body)
		got = append(got, r.Method+" "+r.URL.String()+" "+string(raw))
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	}))
	t.Cleanup(server.Close)
	return &load.REST{Client: server.Client(), URL: server.URL}, &got
}

func TestRESTRequests(t *testing.T) {
	c, got := gateway(t, http.StatusOK, `{"sandbox": {"uid": "u"}, "unknown": 1}`)
	created, err := c.CreateSandbox(t.Context(), &sandboxv1.CreateSandboxRequest{Namespace: "n", Name: "a"})
	require.NoError(t, err)
	require.Equal(t, "u", created.GetSandbox().GetUid())
	_, err = c.UpdateSandbox(t.Context(), &sandboxv1.UpdateSandboxRequest{
		Sandbox: &sandboxv1.Sandbox{Namespace: "n", Name: "a"}, UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"labels", "spec.expire_time"}}, RequestId: "r",
	})
	require.NoError(t, err)
	_, err = c.DeleteSandbox(t.Context(), &sandboxv1.DeleteSandboxRequest{Namespace: "n", Name: "a", Uid: "u", RequestId: "r"})
	require.NoError(t, err)
	require.Len(t, *got, 3)
	require.Regexp(t, `^POST /v1/namespaces/n/sandboxes \{.*"name": ?"a"`, (*got)[0])
	require.Regexp(t, `^PATCH /v1/namespaces/n/sandboxes/a\?requestId=r&updateMask=labels%2Cspec.expire_time `, (*got)[1])
	require.Equal(t, "DELETE /v1/namespaces/n/sandboxes/a?requestId=r&uid=u ", (*got)[2])
}

// A typed error arrives as over gRPC; an answer of a proxy, or none, is no answer of the server.
func TestRESTErrors(t *testing.T) {
	raw, err := protojson.Marshal(status.Convert(typed(errdefs.ErrResourceExhausted, fault.NoCapacity)).Proto())
	require.NoError(t, err)
	c, _ := gateway(t, http.StatusTooManyRequests, string(raw))
	_, err = c.CreateSandbox(t.Context(), &sandboxv1.CreateSandboxRequest{Namespace: "n"})
	reason, wait := load.Classify(err)
	require.Equal(t, "NO_CAPACITY", reason)
	require.Equal(t, time.Millisecond, wait)

	c, _ = gateway(t, http.StatusBadGateway, "<html>")
	_, err = c.DeleteSandbox(t.Context(), &sandboxv1.DeleteSandboxRequest{Namespace: "n", Name: "a"})
	require.Equal(t, codes.Unavailable, status.Code(err))
	c.URL = "http://127.0.0.1:1"
	_, err = c.DeleteSandbox(t.Context(), &sandboxv1.DeleteSandboxRequest{Namespace: "n", Name: "a"})
	require.Equal(t, codes.Unavailable, status.Code(err))
}
