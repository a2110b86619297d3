package auth

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// An API key is `fsb_ID_SECRET`. A Secret keeps a salted hash of it and the ServiceAccount that it stands for. The secret has
// 128 random bits, so a fast hash is enough.
const (
	keyPrefix = "fsb_"
	keyIDLen  = 16

	// SecretPrefix is the prefix of the names of the Secrets that keep API keys.
	SecretPrefix = "apikey-"
)

// SecretType is the type of the Secrets that keep API keys.
const SecretType corev1.SecretType = "fast-sandbox.io/api-key"

// The data of a Secret that keeps an API key.
const (
	dataSalt           = "salt"
	dataHash           = "hash"
	dataNamespace      = "namespace"
	dataServiceAccount = "service-account"
	dataUID            = "service-account-uid"
	dataExpiry         = "expires"
	dataDescription    = "description"
	dataCreator        = "created-by"
)

// Key describes an API key, without its secret.
type Key struct {
	// ID is the part of the key that is not secret.
	ID string
	// Namespace, ServiceAccount and UID are of the ServiceAccount that the key stands for.
	Namespace, ServiceAccount, UID string
	// Description says what the key is for, Creator who made it.
	Description, Creator string
	// Created is when it was made, Expires when it ends; zero for never.
	Created, Expires time.Time
}

// NewKey makes a key: its text, which only the caller has, and the data of the Secret that keeps it. It fills k.ID.
func NewKey(k *Key) (text string, data map[string][]byte) {
	k.ID = strings.ToLower(rand.Text()[:keyIDLen])
	secret, salt := strings.ToLower(rand.Text()), []byte(rand.Text())
	data = map[string][]byte{
		dataSalt: salt, dataHash: keyHash(salt, secret),
		dataNamespace: []byte(k.Namespace), dataServiceAccount: []byte(k.ServiceAccount), dataUID: []byte(k.UID),
		dataDescription: []byte(k.Description), dataCreator: []byte(k.Creator),
	}
	if !k.Expires.IsZero() {
		data[dataExpiry] = []byte(k.Expires.UTC().Format(time.RFC3339))
	}
	return keyPrefix + k.ID + "_" + secret, data
}

// ReadKey returns what a Secret says about its key; false for a Secret that keeps none.
func ReadKey(s *corev1.Secret) (Key, bool) {
	id, ok := strings.CutPrefix(s.Name, SecretPrefix)
	if !ok || s.Type != SecretType {
		return Key{}, false
	}
	k := Key{
		ID: id, Namespace: string(s.Data[dataNamespace]), ServiceAccount: string(s.Data[dataServiceAccount]), UID: string(s.Data[dataUID]),
		Description: string(s.Data[dataDescription]), Creator: string(s.Data[dataCreator]), Created: s.CreationTimestamp.Time,
	}
	if raw := s.Data[dataExpiry]; len(raw) > 0 {
		var err error
		if k.Expires, err = time.Parse(time.RFC3339, string(raw)); err != nil {
			return Key{}, false
		}
	}
	return k, k.Namespace != "" && k.ServiceAccount != "" && k.UID != ""
}

func keyHash(salt []byte, secret string) []byte {
	mac := hmac.New(sha256.New, salt)
	mac.Write([]byte(secret))
	return mac.Sum(nil)
}

// splitKey returns the parts of a key.
func splitKey(text string) (id, secret string, ok bool) {
	rest, ok := strings.CutPrefix(text, keyPrefix)
	if !ok {
		return "", "", false
	}
	id, secret, ok = strings.Cut(rest, "_")
	return id, secret, ok && len(id) == keyIDLen && isKeyText(id) && secret != "" && isKeyText(secret)
}

func isKeyText(s string) bool {
	for _, c := range s {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return false
		}
	}
	return true
}

// Secrets reads the Secrets of the namespace that keeps API keys. client-go's SecretInterface implements it.
type Secrets interface {
	Get(ctx context.Context, name string, opts metav1.GetOptions) (*corev1.Secret, error)
}

// Keys authenticates API keys.
type Keys struct {
	secrets  Secrets
	accounts func(namespace string) Accounts
	memory   *memory[Caller]
	clock    clock.PassiveClock
	hide     func(string) string
}

// Accounts reads ServiceAccounts of a namespace. client-go's ServiceAccountInterface implements it.
type Accounts interface {
	Get(ctx context.Context, name string, opts metav1.GetOptions) (*corev1.ServiceAccount, error)
}

// NewKeys returns an authenticator that has not asked yet.
func NewKeys(secrets Secrets, accounts func(namespace string) Accounts, t Timing, c clock.PassiveClock) *Keys {
	return &Keys{secrets: secrets, accounts: accounts, memory: newMemory[Caller](t, c), clock: c, hide: keyedHash()}
}

// Authenticate returns the ServiceAccount that a key stands for. The errors are those of Tokens.
func (k *Keys) Authenticate(ctx context.Context, text string) (Caller, error) {
	id, secret, ok := splitKey(text)
	if !ok {
		return Caller{}, unauthenticated("the API key is malformed")
	}
	got, err := k.memory.ask(ctx, k.hide(text), func(ctx context.Context) (answer[Caller], error) { return k.look(ctx, id, secret) })
	switch {
	case err != nil && ctx.Err() != nil:
		return Caller{}, fault.FromContext(ctx, "looking up the API key", err)
	case err != nil:
		return Caller{}, undecided(err, "the API server cannot be asked whose API key this is")
	case !got.allowed:
		return Caller{}, unauthenticated("the API key is not valid")
	}
	return got.value, nil
}

// look reads the Secret and the ServiceAccount: a key does not outlive either.
func (k *Keys) look(ctx context.Context, id, secret string) (answer[Caller], error) {
	no := answer[Caller]{}
	s, err := k.secrets.Get(ctx, SecretPrefix+id, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return no, nil
	}
	if err != nil {
		return no, err
	}
	key, ok := ReadKey(s)
	if !ok || subtle.ConstantTimeCompare(keyHash(s.Data[dataSalt], secret), s.Data[dataHash]) != 1 {
		return no, nil
	}
	if !key.Expires.IsZero() && !k.clock.Now().Before(key.Expires) {
		return no, nil
	}
	account, err := k.accounts(key.Namespace).Get(ctx, key.ServiceAccount, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && string(account.UID) != key.UID {
		return no, nil
	}
	if err != nil {
		return no, err
	}
	return answer[Caller]{value: serviceAccount(key), allowed: true, until: key.Expires}, nil
}

// serviceAccount returns the caller that the API server would name for a token of the ServiceAccount.
func serviceAccount(k Key) Caller {
	const all = "system:serviceaccounts"
	return Caller{
		User: "system:serviceaccount:" + k.Namespace + ":" + k.ServiceAccount, UID: k.UID, Groups: []string{all, all + ":" + k.Namespace}, Method: APIKey,
	}.normalized()
}

func (k *Keys) known(text string) bool { return k.memory.knows(k.hide(text)) }

// keyedHash returns a function by which credentials are remembered without keeping them.
func keyedHash() func(string) string {
	key := []byte(rand.Text())
	return func(s string) string {
		mac := hmac.New(sha256.New, key)
		mac.Write([]byte(s))
		return string(mac.Sum(nil))
	}
}
