package ctrd

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// dockerConfig is the part of Docker's config.json that holds credentials, by registry.
type dockerConfig struct {
	Auths map[string]struct {
		// Auth is base64 of user:password; Username and Password are used without it. IdentityToken is a refresh token.
		Auth          string `json:"auth"`
		Username      string `json:"username"`
		Password      string `json:"password"`
		IdentityToken string `json:"identitytoken"`
	} `json:"auths"`
}

// readDockerConfig reads the file. A file that does not exist has no credentials: the secret may be created later. One that
// cannot be read is Unavailable, because its credentials may be needed.
func readDockerConfig(path string) (*dockerConfig, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return &dockerConfig{}, nil
	}
	var c dockerConfig
	if err == nil {
		err = json.Unmarshal(raw, &c)
	}
	if err != nil {
		return nil, fault.Wrap(err, errdefs.ErrUnavailable, fault.ImagePullFailed, "the agent's registry credentials cannot be read")
	}
	return &c, nil
}

// credentials returns user and secret for a registry's host; a refresh token has an empty user. Both are empty if the file
// has none for the registry. Of several keys with this host the host itself takes precedence, then the first in alphabetical order.
func (c *dockerConfig) credentials(host string) (user, secret string, err error) {
	for _, key := range append([]string{host}, slices.Sorted(maps.Keys(c.Auths))...) {
		a, ok := c.Auths[key]
		if !ok || hostOf(key) != canonicalHost(host) {
			continue
		}
		switch {
		case a.IdentityToken != "":
			return "", a.IdentityToken, nil
		case a.Auth != "":
			raw, err := base64.StdEncoding.DecodeString(a.Auth)
			if err != nil {
				return "", "", fmt.Errorf("decoding the credentials of %s: %w", key, err)
			}
			user, secret, _ := strings.Cut(strings.TrimRight(string(raw), "\x00"), ":")
			return user, secret, nil
		default:
			return a.Username, a.Password, nil
		}
	}
	return "", "", nil
}

// hostOf returns the host of a key, which may be a bare host or a URL.
func hostOf(key string) string {
	if _, rest, ok := strings.Cut(key, "://"); ok {
		key = rest
	}
	host, _, _ := strings.Cut(key, "/")
	return canonicalHost(host)
}

// canonicalHost returns the host that image references use. Docker's own registry has several hosts.
func canonicalHost(host string) string {
	if host == "docker.io" || strings.HasSuffix(host, ".docker.io") {
		return "docker.io"
	}
	return host
}
