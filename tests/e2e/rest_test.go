//go:build e2e

package e2e_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

func itoa(n int) string { return strconv.Itoa(n) }

// curl reads a path of the gateway with curl, as the README does.
func curl(t *testing.T, path string, args ...string) string {
	t.Helper()
	r := cluster.Exec(t, "curl", append([]string{"-sS", "--max-time", "20", "--cacert", cluster.Env(t, "FSB_CACERT"),
		"--cert", cluster.Env(t, "FSB_CERT"), "--key", cluster.Env(t, "FSB_KEY"), cluster.Env(t, "FSB_GATEWAY") + path}, args...)...)
	require.Zero(t, r.Code, r.Stderr)
	return r.Stdout
}

// gateway is an HTTP client with the client's certificate.
func gateway(t *testing.T) *http.Client {
	t.Helper()
	cfg, err := cluster.TLS(t).ClientConfig("gateway.fast-sandbox.io")
	require.NoError(t, err)
	transport := &http.Transport{TLSClientConfig: cfg, ForceAttemptHTTP2: true}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func call(t *testing.T, method, path, body string) (int, map[string]any) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, cluster.Env(t, "FSB_GATEWAY")+path, strings.NewReader(body))
	require.NoError(t, err)
	resp, err := gateway(t).Do(req)
	require.NoError(t, err)
	defer func() { require.NoError(t, resp.Body.Close()) }()
	raw, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	var out map[string]any
	require.NoError(t, json.Unmarshal(raw, &out), "%s", raw)
	return resp.StatusCode, out
}

// TestFollowingSilentLog receives the headers before the process writes anything.
func TestFollowingSilentLog(t *testing.T) {
	s := create(t, sandboxes(t), sleeper(uniqueName("silent"))).GetSandbox()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, cluster.Env(t, "FSB_GATEWAY")+"/v1/namespaces/default/sandboxes/"+s.GetName()+":logs?follow=true", nil)
	require.NoError(t, err)
	resp, err := gateway(t).Do(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, http.StatusOK, resp.StatusCode)
}

// TestREST runs a sandbox's life through the gateway, with a concurrent watch.
func TestREST(t *testing.T) {
	name := uniqueName("rest")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, cluster.Env(t, "FSB_GATEWAY")+"/v1/namespaces/default/sandboxes:watch?name="+name, nil)
	require.NoError(t, err)
	watch, err := gateway(t).Do(req)
	require.NoError(t, err)
	defer func() { _ = watch.Body.Close() }()
	require.Equal(t, http.StatusOK, watch.StatusCode)

	code, created := call(t, http.MethodPost, "/v1/namespaces/default/sandboxes", `{"name":"`+name+`","requestId":"`+name+`","spec":{"image":"`+cluster.Busybox+`","pool":"default","command":["sh","-c","echo hello over REST; sleep 600"]}}`)
	require.Equal(t, http.StatusOK, code, "%v", created)
	uid := created["sandbox"].(map[string]any)["uid"].(string)
	require.NotEmpty(t, created["timings"])

	code, got := call(t, http.MethodGet, "/v1/namespaces/default/sandboxes/"+name, "")
	require.Equal(t, http.StatusOK, code)
	require.Equal(t, uid, got["sandbox"].(map[string]any)["uid"])
	require.Contains(t, curl(t, "/v1/namespaces/default/sandboxes/"+name+":logs", "-H", "Accept: text/plain"), "hello over REST")

	code, failure := call(t, http.MethodPost, "/v1/namespaces/default/sandboxes", `{"name":"`+name+`","spec":{"image":"`+cluster.Busybox+`","pool":"default"}}`)
	require.Equal(t, http.StatusConflict, code)
	require.Contains(t, failure["details"].([]any)[0].(map[string]any)["reason"], "SANDBOX_EXISTS")

	code, _ = call(t, http.MethodDelete, "/v1/namespaces/default/sandboxes/"+name, "")
	require.Equal(t, http.StatusOK, code)
	gone(t, "default", name, uid)

	types := map[string]bool{}
	for lines := bufio.NewScanner(watch.Body); !types["TYPE_DELETED"] && lines.Scan(); {
		var event struct{ Result struct{ Type string } }
		require.NoError(t, json.Unmarshal(lines.Bytes(), &event), "each line is one JSON document")
		types[event.Result.Type] = true
	}
	require.Subset(t, types, map[string]bool{"TYPE_SYNCED": true, "TYPE_ADDED": true, "TYPE_DELETED": true})

	code, _ = call(t, http.MethodGet, "/v1/namespaces/default/sandboxes/"+name, "")
	require.Equal(t, http.StatusNotFound, code)
	var document map[string]any
	require.NoError(t, json.Unmarshal([]byte(curl(t, "/openapi.json")), &document))
	require.Contains(t, document["paths"], "/v1/namespaces/{namespace}/sandboxes")
	for path, list := range map[string]string{"/v1/namespaces/default/pools": "pools", "/v1/agents": "agents"} {
		code, answer := call(t, http.MethodGet, path, "")
		require.Equal(t, http.StatusOK, code, path)
		require.Contains(t, answer, list)
	}
	require.Contains(t, curl(t, "/v1/gc/namespaces/fast-sandbox-system/graph", "-f"), `{"result":{"vertices":[`)
	curl(t, "/healthz", "-f")
}
