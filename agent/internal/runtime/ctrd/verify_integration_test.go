//go:build integration

package ctrd_test

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// TestPrivateImageOfAnotherTenant has an image on the node that the pool of one tenant pulled with its credentials, and a pool of
// another tenant, without them, whose sandbox asks for it.
func TestPrivateImageOfAnotherTenant(t *testing.T) {
	const user, password = "owner", "secret"
	s := containerd.Start(t)
	var mu sync.Mutex
	var seen []string // requests for manifests
	registry := containerd.NewRegistry(t, user, password, func(_ http.ResponseWriter, r *http.Request) bool {
		mu.Lock()
		defer mu.Unlock()
		if _, _, ok := r.BasicAuth(); ok && strings.Contains(r.URL.Path, "/manifests/") {
			seen = append(seen, r.Method)
		}
		return false
	})
	login := remote.WithAuth(&authn.Basic{Username: user, Password: password})
	ref := registry.Push(t, "private:1", containerd.Image(t), login)
	config := filepath.Join(t.TempDir(), "config.json")
	require.NoError(t, os.WriteFile(config, fmt.Appendf(nil, `{"auths":{%q:{"auth":%q}}}`, registry.Host,
		base64.StdEncoding.EncodeToString([]byte(user+":"+password))), 0o600))
	agent := func(dockerConfig string, verify bool) *ctrd.Runtime {
		return newRuntime(t, s, func(c *ctrd.Config) { c.DockerConfig, c.VerifyImages = dockerConfig, verify })
	}
	request := runtime.Container{Image: ref, Command: []string{"true"}}
	owner, stranger := agent(config, true), agent("", true)
	require.NoError(t, try(t, s, owner, request), "pulled")

	require.NoError(t, try(t, s, agent("", false), request), "the policy Cached lets anyone use it")
	err := try(t, s, stranger, request)
	require.True(t, errdefs.IsNotFound(err), "%v", err)
	require.Equal(t, fault.ImageNotFound, fault.ReasonOf(err))
	require.ErrorContains(t, err, "does not exist or may not be pulled")

	mu.Lock()
	seen = nil
	mu.Unlock()
	require.NoError(t, try(t, s, owner, request))
	mu.Lock()
	require.Equal(t, []string{http.MethodHead}, seen, "one request, and no download")
	mu.Unlock()

	// The tag moves: the next create runs the new image.
	registry.Push(t, "private:1", containerd.Image(t, containerd.WithFile("/bin/moved", "#!/bin/sh\n", 0o755)), login)
	require.NoError(t, try(t, s, owner, runtime.Container{Image: ref, Command: []string{"/bin/moved"}}))

	registry.Close()
	err = try(t, s, owner, request)
	require.Equal(t, fault.ImagePullFailed, fault.ReasonOf(err), "%v", err)
	require.NoError(t, try(t, s, agent("", false), request))
	s.CheckClean(t)
}
