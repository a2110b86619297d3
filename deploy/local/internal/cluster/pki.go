package cluster

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/components"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/network"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/pki"
)

// ensureKubernetesPKI creates Kubernetes' certificates, where they are missing or old, and the administrator's kubeconfig.
func ensureKubernetesPKI(c components.Config, now time.Time) error {
	authorities := make(map[string]*pki.Authority)
	for _, name := range []string{components.AuthorityCluster, components.AuthorityFrontProxy} {
		authority, err := pki.EnsureAuthority(c.PKIDir(), name, now)
		if err != nil {
			return err
		}
		authorities[name] = authority
	}
	for _, certificate := range c.Certificates() {
		if err := authorities[certificate.Authority].Ensure(certificate.Files, certificate.Subject, now); err != nil {
			return err
		}
	}
	if err := pki.EnsureSigningKey(c.SigningKey()); err != nil {
		return err
	}
	kubeconfig, err := c.AdminKubeconfig()
	if err != nil {
		return err
	}
	_, err = host.WriteFile(c.Kubeconfig(), kubeconfig, 0o600)
	return err
}

// identity is the TLS material of one Fast Sandbox role, or of an authority.
type identity struct {
	// namespace of its Secret.
	namespace     string
	ca, cert, key []byte
}

// ensureSandboxPKI creates Fast Sandbox's certificates, where they are missing or old, writes the user's into the client
// directory, and returns those of the cluster by the names of their Secrets.
func ensureSandboxPKI(c components.Config, now time.Time) (map[string]identity, error) {
	authority, err := pki.EnsureAuthority(c.SandboxPKIDir(), "ca", now)
	if err != nil {
		return nil, err
	}
	identities := make(map[string]identity)
	add := func(secret, role string, subject pki.Subject) error {
		id, err := ensureIdentity(c, authority, strings.TrimSuffix(secret, "-tls"), subject, now)
		id.namespace = pki.Namespace(role)
		identities[secret] = id
		return err
	}
	for _, role := range pki.ServerRoles() {
		if err := add(role+"-tls", role, pki.Server(role, net.ParseIP(network.NodeIP))); err != nil {
			return nil, err
		}
	}
	for _, role := range pki.ClientRoles() {
		if err := add(role+"-client-tls", role, pki.Client(role)); err != nil {
			return nil, err
		}
	}
	agents, err := authority.EnsureServerAuthority(c.SandboxPKIDir(), pki.AgentAuthority, pki.AgentDomain, now)
	if err != nil {
		return nil, err
	}
	key, err := os.ReadFile(agents.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("reading a key: %w", err)
	}
	identities[pki.AgentAuthority] = identity{namespace: pki.SandboxNamespace, ca: authority.PEM, cert: agents.PEM, key: key}
	mine, err := ensureIdentity(c, authority, "user", pki.User(), now)
	if err != nil {
		return nil, err
	}
	for name, content := range map[string][]byte{"ca.crt": mine.ca, "tls.crt": mine.cert, "tls.key": mine.key} {
		if _, err := host.WriteFile(filepath.Join(c.ClientDir(), name), content, 0o600); err != nil {
			return nil, err
		}
	}
	return identities, nil
}

// ensureIdentity creates the certificate of a subject, if it is missing or old.
func ensureIdentity(c components.Config, authority *pki.Authority, name string, subject pki.Subject, now time.Time) (identity, error) {
	files := pki.Files{Cert: filepath.Join(c.SandboxPKIDir(), name+".crt"), Key: filepath.Join(c.SandboxPKIDir(), name+".key")}
	if err := authority.Ensure(files, subject, now); err != nil {
		return identity{}, err
	}
	cert, err := os.ReadFile(files.Cert)
	if err != nil {
		return identity{}, fmt.Errorf("reading a certificate: %w", err)
	}
	key, err := os.ReadFile(files.Key)
	if err != nil {
		return identity{}, fmt.Errorf("reading a key: %w", err)
	}
	return identity{ca: authority.PEM, cert: cert, key: key}, nil
}
